"""Where everything of the local stack lies, read from the environment once."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.redis.redis_address import redis_address


class LocalSettings(BaseSettings):
    """The local stack's settings.

    ``home`` holds all state (Redis, logs, checkpoints, nodes). ``redis_url`` names a server that
    is already there; without it one is started. ``port`` is the controller's.
    """

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", extra="ignore")

    home: Path = Path(".meshloom")
    host: str = "127.0.0.1"
    port: int = 8400
    redis_url: str | None = None
    redis_ca: Path | None = None
    redis_cert: Path | None = None
    redis_key: Path | None = None
    token: str | None = None

    @property
    def redis_address(self) -> str | None:
        """The URL of that server, with the files of TLS in it."""
        if self.redis_url is None:
            return None
        return redis_address(
            self.redis_url, ca=self.redis_ca, cert=self.redis_cert, key=self.redis_key
        )


def redis_server_on_path() -> Path | None:
    """The ``redis-server`` that the user's PATH names, if any."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def child_environment(*, without: Collection[str] = (), **changes: str) -> dict[str, str]:
    """This process's environment ``without`` some variables and with ``changes``, for a child."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, **changes}
