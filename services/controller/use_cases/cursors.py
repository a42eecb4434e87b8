"""Opaque cursors: a place in a list, stable while the list grows."""

import base64
import binascii
import re
from typing import Final

from services.contract.problems import Fault
from services.controller.domain.errors import InvalidRequestError
from services.controller.ports.jobs import Place

# Not \d, which means the digits of every script.
_ENTRY_ID: Final = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
_PLACE: Final = re.compile(r"([0-9]{1,15}) (\w+)", re.ASCII)


def from_place(place: Place) -> str:
    """The cursor behind a job."""
    return base64.urlsafe_b64encode(f"{place.created_ms} {place.job_id}".encode()).decode()


def to_place(cursor: str | None) -> Place | None:
    """The place that a cursor means.

    Raises:
        InvalidRequestError: It is none of ours.
    """
    if cursor is None:
        return None
    try:
        place = _PLACE.fullmatch(base64.urlsafe_b64decode(cursor.encode()).decode())
    except (binascii.Error, ValueError) as error:
        raise _invalid(cursor) from error
    if place is None:
        raise _invalid(cursor)
    return Place(int(place.group(1)), place.group(2))


def to_entry_id(cursor: str | None) -> str | None:
    """The stream entry that a cursor (or a ``Last-Event-ID``) means.

    Raises:
        InvalidRequestError: It is none of ours.
    """
    if cursor is not None and not _ENTRY_ID.fullmatch(cursor):
        raise _invalid(cursor)
    return cursor


def _invalid(cursor: str) -> InvalidRequestError:
    return InvalidRequestError(
        [
            Fault(
                pointer="",
                detail=f"cursor: {cursor!r} is not one that this API gave out",
                code="invalid_cursor",
            )
        ]
    )
