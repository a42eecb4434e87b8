"""The controller's settings: the one place in it that reads the environment."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Read from variables that begin with ``MESHLOOM_``.

    Port 0 takes a free port; the line ``listening`` of the log names it. A controller that others
    than this machine can reach wants a token from them. ``max_streams`` bounds how many may follow
    logs and events at a time, for each holds a connection to Redis.
    """

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65_535)
    redis_url: str
    token: SecretStr | None = None
    max_streams: int = Field(default=64, ge=1, le=10_000)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the controller."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _strangers_need_a_token(self) -> Self:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("MESHLOOM_TOKEN is empty: set a long random one, or unset it")
        if not self.is_loopback and self.token is None:
            raise ValueError(
                f"MESHLOOM_HOST is {self.host}, which other machines can reach: "
                "set MESHLOOM_TOKEN, or take 127.0.0.1"
            )
        return self
