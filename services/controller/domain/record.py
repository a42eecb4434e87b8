"""The base of all records that the store keeps, and moments in them that a clock left ahead."""

from typing import Final

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen; fields that a newer controller wrote are passed over, so that an older one reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")


_CLOCK_SLACK_MS: Final = 5_000


def is_ahead(moment_ms: int, now_ms: int) -> bool:
    """Whether a moment of the past lies ahead: the clock of Redis was set back since."""
    return moment_ms - now_ms > _CLOCK_SLACK_MS
