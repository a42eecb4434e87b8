"""Moments as people type them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

_AGO: Final = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def moment(text: str) -> datetime:
    """An RFC 3339 time, or how long ago: ``90s``, ``15m``, ``2h``, ``1d``; by this machine's clock.

    A time without an offset is one of this machine's time zone.

    Raises:
        typer.BadParameter: It is neither.
    """
    try:
        if ago := _AGO.fullmatch(text):
            number, unit = ago.groups()
            return datetime.now(UTC) - timedelta(**{_UNITS[unit]: int(number)})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a time such as 2026-11-21T18:00:00Z nor an age such as 15m"
        ) from None


Since = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="WHEN", help="A time, or an age: 90s, 15m, 2h, 1d."),
]
Until = Annotated[
    datetime | None, typer.Option(parser=moment, metavar="WHEN", help="Before then; as --since.")
]
