"""Where the controller is, and the token for it: the one reader of these variables, for programs and the command line."""

import os
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshloom.client.errors import ClientError
from services.contract.api.fault_words import in_words
from services.contract.system.secret_files import with_secret_files

_PREFIX: Final = "MESHLOOM_"


class ClientSettings(BaseModel):
    """Each is the environment variable ``MESHLOOM_<NAME>``; an empty one counts as unset."""

    model_config = ConfigDict(frozen=True)

    url: str | None = Field(
        default=None, description="The controller's address; unset: 127.0.0.1 and the port."
    )
    port: int = Field(
        default=8400,
        ge=1,
        le=65_535,
        description="The controller's port, where no address is set.",
    )
    token: str | None = Field(default=None, repr=False, description="The bearer token to send.")
    token_file: Path | None = Field(
        default=None, description="File that has the token, in place of `MESHLOOM_TOKEN`."
    )

    @classmethod
    def from_environment(cls) -> Self:
        """The settings as the environment has them now.

        Raises:
            ClientError: A variable has no valid value, such as a port that is not a number, or names a
                file that cannot be read.
        """
        given = {name: os.environ.get(f"{_PREFIX}{name.upper()}") for name in cls.model_fields}
        set_ones = {name: value for name, value in given.items() if value}
        try:
            read = with_secret_files(set_ones, "token")
        except ValueError as error:
            raise ClientError(str(error)) from None
        try:
            return cls.model_validate(read)
        except ValidationError as error:
            (fault, *_) = error.errors(include_url=False)
            name = str(fault["loc"][0]).upper()
            raise ClientError(f"{_PREFIX}{name}: {in_words(fault)}") from None

    @property
    def base_url(self) -> str:
        """The controller's root, without a slash at its end."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")
