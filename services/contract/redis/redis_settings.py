"""The settings by which controllers and agents find Redis."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.redis.redis_address import parts_of, redis_address
from services.contract.system.secret_files import with_secret_files

_TLS = "rediss"


class RedisSettings(BaseSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; docs/configuration.md lists them."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", frozen=True, extra="ignore")

    redis_url: str = Field(
        description="The Redis server; `rediss://` for TLS. `make up` starts one where it is not set."
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
    telemetry_redis_url: str | None = Field(
        default=None,
        description=(
            "Another Redis server, or another database of the same one, for what ranks report: samples, curves, "
            "output. The same for all controllers and agents. Password, authorities and certificate are those of "
            "`MESHLOOM_REDIS_URL`, unless its URL has a password. Unset: all is on one server."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_redis_password(cls, values: object) -> object:
        return with_secret_files(values, "redis_password")

    @property
    def redis_address(self) -> str:
        """The URL of Redis, with its password and the files of TLS in it."""
        return redis_address(
            self.redis_url,
            password=self._password,
            ca=self.redis_ca,
            cert=self.redis_cert,
            key=self.redis_key,
        )

    @property
    def telemetry_redis_address(self) -> str | None:
        """The same of the Redis for telemetry; None: it has none of its own."""
        if not self.telemetry_redis_url:
            return None
        parts = parts_of(self.telemetry_redis_url)
        has_tls = parts.scheme == _TLS
        return redis_address(
            self.telemetry_redis_url,
            password=self._password if parts.password is None else None,
            ca=self.redis_ca if has_tls else None,
            cert=self.redis_cert if has_tls else None,
            key=self.redis_key if has_tls else None,
        )

    @property
    def _password(self) -> str | None:
        return None if self.redis_password is None else self.redis_password.get_secret_value()

    @model_validator(mode="after")
    def _redis_can_be_trusted(self) -> Self:
        _ = self.redis_address  # it says itself what is wrong
        _ = self.telemetry_redis_address
        return self
