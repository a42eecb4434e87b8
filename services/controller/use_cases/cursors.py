"""Opaque cursors: a place in a list, stable while the list grows."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Final

from services.contract.words.problems import Fault
from services.controller.domain.errors import InvalidRequestError
from services.controller.ports.jobs import Place

# Not \d, which means the digits of every script.
_ENTRY_ID: Final = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
_PLACE: Final = re.compile(r"([0-9]{1,15}) (\w+)", re.ASCII)
_NAME: Final = re.compile(r"name ([a-z0-9.-]{1,63})")
_ORDER: Final = re.compile(r"(-?[a-z]+) (-?[0-9]{1,15}) (\w+)", re.ASCII)


def from_place(place: Place) -> str:
    """The cursor behind a record."""
    return base64.urlsafe_b64encode(f"{place.created_ms} {place.id}".encode()).decode()


def to_place(cursor: str | None) -> Place | None:
    """The place that a cursor means.

    Raises:
        InvalidRequestError: It is none of ours.
    """
    if cursor is None:
        return None
    created_ms, job_id = _parts(cursor, _PLACE)
    return Place(int(created_ms), job_id)


def from_order(order: str, value: int, job_id: str) -> str:
    """The cursor behind a job in a list that is sorted by ``order``, where it has ``value``."""
    return base64.urlsafe_b64encode(f"{order} {value} {job_id}".encode()).decode()


def to_order(cursor: str | None, order: str) -> tuple[int, str] | None:
    """The value and the job that a cursor of a list in this order means.

    Raises:
        InvalidRequestError: It is none of ours, or of another order.
    """
    if cursor is None:
        return None
    its_order, value, job_id = _parts(cursor, _ORDER)
    if its_order != order:
        raise _invalid(cursor)
    return int(value), job_id


def from_name(name: str) -> str:
    """The cursor behind the record of that name, in a list by name."""
    return base64.urlsafe_b64encode(f"name {name}".encode()).decode()


def to_name(cursor: str | None) -> str:
    """The name that a cursor means; "" before the first.

    Raises:
        InvalidRequestError: It is none of ours.
    """
    return "" if cursor is None else _parts(cursor, _NAME)[0]


def to_entry_id(cursor: str | None) -> str | None:
    """The stream entry that a cursor (or a ``Last-Event-ID``) means.

    Raises:
        InvalidRequestError: It is none of ours.
    """
    if cursor is not None and (not _ENTRY_ID.fullmatch(cursor) or not cursor.strip("0-")):
        raise _invalid(cursor)  # no entry is 0-0, and Redis knows none before it
    return cursor


def _parts(cursor: str, form: re.Pattern[str]) -> Sequence[str]:
    try:
        found = form.fullmatch(base64.urlsafe_b64decode(cursor.encode()).decode())
    except (binascii.Error, ValueError) as error:
        raise _invalid(cursor) from error
    if found is None:
        raise _invalid(cursor)
    return found.groups()


def _invalid(cursor: str) -> InvalidRequestError:
    return InvalidRequestError(
        [
            Fault(
                pointer="",
                detail=f"cursor: {cursor!r} was not issued by this API for this list",
                code="invalid_cursor",
            )
        ]
    )
