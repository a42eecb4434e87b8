"""The controller's settings: the one place in it that reads the environment."""

import ipaddress
import math
import string
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.contract.jobs.code_archives import (
    DEFAULT_CODE_MIB,
    DEFAULT_CODE_STORE_MIB,
    MOST_CODE_MIB,
)
from services.contract.jobs.entry_points import EntryPoints, entry_points
from services.contract.redis.redis_address import redis_address

MIN_PASSWORD_CHARACTERS: Final = 16
_MIN_TOKEN_BITS: Final = 128
_MIN_TOKEN_LETTERS: Final = 8


class Settings(BaseSettings):
    """Read from variables that begin with ``MESHLOOM_``.

    Port 0 takes a free port; the line ``listening`` of the log names it. A controller that others
    than this machine can reach wants a token from them, of at least 128 bits. ``max_streams`` bounds how many may follow
    logs and events at a time, for each holds a connection to Redis. One owner may have ``max_unfinished_jobs`` that have not ended. ``max_connections`` bounds all clients together: beyond it the
    oldest whose request has not come yet is closed. A request has ``request_timeout_s`` to come whole,
    and its answer as long to be read. ``allowed_hosts`` are the names
    (separated by commas) under which the controller is served beside those of loopback. Every
    token may ask ``rate_per_s`` times a second, and ``rate_burst`` times at once. ``factory_prefixes`` (separated by commas)
    are the entry points that jobs may name beside the built-ins; ``*``: all. Unset, that is all of them
    on loopback without a token, and none otherwise. Elastic jobs grow once there has been room for
    ``grow_after_s``. ``redis_ca``, ``redis_cert`` and ``redis_key`` are
    files for a ``redis_url`` that begins with ``rediss://``. A request for a plan waits up to
    ``plan_wait_s`` for its model to be profiled, which may take ``probe_timeout_s`` on the node.
    An archive of uploaded code has up to ``max_code_mib``, all of them ``max_code_store_mib``.
    ``uploaded_code`` says whether jobs may run such code; unset, where every entry point is allowed.
    So many days after its end Redis keeps samples and stacks of a job, and steps, output and history that
    storage could not take: ``keep_telemetry_days``.
    """

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65_535)
    redis_url: str
    redis_ca: Path | None = None
    redis_cert: Path | None = None
    redis_key: Path | None = None
    token: SecretStr | None = None
    allowed_hosts: Annotated[frozenset[str], NoDecode] = frozenset()
    rate_per_s: float = Field(default=100, gt=0, le=1e6)
    rate_burst: int = Field(default=1000, ge=1, le=1_000_000)
    factory_prefixes: Annotated[tuple[str, ...] | None, NoDecode] = None
    uploaded_code: bool | None = None
    max_code_mib: int = Field(default=DEFAULT_CODE_MIB, ge=1, le=MOST_CODE_MIB)
    max_code_store_mib: int = Field(default=DEFAULT_CODE_STORE_MIB, ge=1, le=1 << 20)
    grow_after_s: float = Field(default=30.0, ge=0, le=86_400)
    max_streams: int = Field(default=64, ge=1, le=10_000)
    max_unfinished_jobs: int = Field(default=2_000, ge=1, le=1_000_000)
    max_connections: int = Field(default=512, ge=8, le=100_000)
    request_timeout_s: float = Field(default=30.0, gt=0, le=3_600)
    plan_wait_s: float = Field(default=5, ge=0, le=60)
    probe_timeout_s: float = Field(default=120, gt=0, le=3_600)
    keep_telemetry_days: float = Field(default=7, ge=0.01, le=3_650)
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

    @property
    def redis_address(self) -> str:
        """The URL of Redis, with the files of TLS in it."""
        return redis_address(
            self.redis_url, ca=self.redis_ca, cert=self.redis_cert, key=self.redis_key
        )

    @model_validator(mode="after")
    def _redis_can_be_trusted(self) -> Self:
        _ = self.redis_address  # it says itself what is wrong
        return self

    @property
    def entry_points(self) -> EntryPoints:
        """Which entry points jobs may name."""
        return entry_points(
            self.factory_prefixes, otherwise_any=self.token is None, uploads=self.uploaded_code
        )

    @field_validator("factory_prefixes", mode="before")
    @classmethod
    def _split_prefixes(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return frozenset(name.strip().lower() for name in value.split(",") if name.strip())

    @model_validator(mode="after")
    def _strangers_need_a_token(self) -> Self:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("MESHLOOM_TOKEN is empty: set a long random one, or unset it")
        if not self.is_loopback and self.token is None:
            raise ValueError(
                f"MESHLOOM_HOST is {self.host}, which other machines can reach: "
                "set MESHLOOM_TOKEN, or take 127.0.0.1"
            )
        if not self.is_loopback and self.token is not None:
            _refuse_guessable(self.token.get_secret_value(), self.host)
        return self


def _refuse_guessable(token: str, host: str) -> None:
    """Refuse a token with fewer random bits than 128, if all of its characters were random."""
    used = set(token)
    alphabet = 64
    if used <= set(string.hexdigits):
        alphabet = 10 if used <= set(string.digits) else 16
    bits = int(len(token) * math.log2(alphabet))
    if bits < _MIN_TOKEN_BITS or len(used) < _MIN_TOKEN_LETTERS:
        raise ValueError(
            f"MESHLOOM_TOKEN can be guessed: it has {len(token)} characters, at most {bits} random "
            f"bits, and other machines can reach MESHLOOM_HOST {host}; take one of at least "
            f"{_MIN_TOKEN_BITS} bits, such as `openssl rand -hex 32` makes"
        )


class AclSettings(BaseSettings):
    """The passwords of Redis's users, for the file that ``services.controller.acl`` prints."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", frozen=True, extra="ignore")

    redis_controller_password: SecretStr = Field(min_length=MIN_PASSWORD_CHARACTERS)
    redis_agent_password: SecretStr | None = None
