"""The base of all records that the store keeps."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen; fields that a newer controller wrote are passed over, so that an older one reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")
