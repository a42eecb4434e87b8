"""What all messages have in common: frozen shapes, and the attempt that they speak of."""

from pydantic import BaseModel, ConfigDict, Field

from services.contract.words.bounds import NAME_CHARACTERS, Positive
from services.contract.words.ids import JobId


class Message(BaseModel):
    """A value that is never changed.

    A field that this version does not know is ignored: controllers and agents of two versions work
    together while one of them is being replaced. A spec inside is a ``CarriedSpec``.
    """

    model_config = ConfigDict(
        extra="ignore", frozen=True, json_schema_serialization_defaults_required=True
    )


class Address(Message):
    """A host and a port that other nodes can reach."""

    host: str = Field(max_length=NAME_CHARACTERS)
    port: int = Field(ge=1, le=65_535)


class OfAttempt(Message):
    """Speaks of one attempt of a job; ``fence`` is the attempt's number."""

    job_id: JobId
    fence: Positive
