"""Where everything of the local stack lies, read from the environment once."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.redis.redis_address import redis_address
from services.contract.storage.storage_address import BucketAddress, storage_address
from services.contract.system.secret_files import with_secret_files


class LocalSettings(BaseSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; the services read theirs themselves."""

    # Empty, a home would be the folder that one is in, which the stack closes to all others.
    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", env_ignore_empty=True, extra="ignore")

    home: Path = Field(
        default=Path(".meshloom"),
        description="Folder of all state of the local stack: Redis, logs, checkpoints.",
    )
    host: str = Field(
        default="127.0.0.1", description="The address on which the controller listens."
    )
    port: int = Field(default=8400, description="The controller's port.")
    redis_url: str | None = Field(
        default=None, description="A running Redis server; unset: `make up` starts one."
    )
    redis_ca: Path | None = Field(
        default=None,
        description="File with the certificates of the authorities that sign Redis's; unset: the system's.",
    )
    redis_cert: Path | None = Field(
        default=None, description="File with the client certificate for Redis."
    )
    redis_key: Path | None = Field(default=None, description="File with that certificate's key.")
    redis_password: SecretStr | None = Field(
        default=None,
        description="The password of the user in `MESHLOOM_REDIS_URL`, which then has none; of any characters.",
    )
    redis_password_file: Path | None = Field(
        default=None, description="File that has it, in place of `MESHLOOM_REDIS_PASSWORD`."
    )
    checkpoint_root: Annotated[Path | BucketAddress | None, BeforeValidator(storage_address)] = (
        Field(
            default=None,
            description="Folder of all jobs' checkpoints, or `s3://BUCKET/PREFIX`; unset: `checkpoints` in the home folder.",
        )
    )
    token: str | None = Field(default=None, description="The operator's bearer token.")
    token_file: Path | None = Field(
        default=None, description="File that has the token, in place of `MESHLOOM_TOKEN`."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, values: object) -> object:
        return with_secret_files(values, "token", "redis_password")

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        _ = self.redis_address
        return self

    @property
    def redis_address(self) -> str | None:
        """The URL of that server, with the files of TLS in it."""
        if self.redis_url is None:
            return None
        return redis_address(
            self.redis_url,
            password=None
            if self.redis_password is None
            else self.redis_password.get_secret_value(),
            ca=self.redis_ca,
            cert=self.redis_cert,
            key=self.redis_key,
        )


def redis_server_on_path() -> Path | None:
    """The ``redis-server`` that the user's PATH names, if any."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def child_environment(*, without: Collection[str] = (), **changes: str) -> dict[str, str]:
    """This process's environment ``without`` some variables and with ``changes``, for a child."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, **changes}
