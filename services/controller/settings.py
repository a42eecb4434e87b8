"""The controller's settings: the one place in it that reads the environment."""

import ipaddress
import math
import os
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.contract.jobs.code_archives import (
    DEFAULT_CODE_MIB,
    DEFAULT_CODE_STORE_MIB,
    MOST_CODE_MIB,
)
from services.contract.jobs.entry_points import EntryPoints, entry_points
from services.contract.jobs.specs import HIGHEST_PRIORITY, MAX_SPEC_BYTES
from services.contract.redis.redis_settings import RedisSettings
from services.contract.storage.storage_address import BucketAddress, storage_address
from services.contract.system.secret_files import with_secret_files

MIN_PASSWORD_CHARACTERS: Final = 16
_MIN_TOKEN_BITS: Final = 128
_MIN_TOKEN_LETTERS: Final = 8


class Settings(RedisSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; docs/configuration.md lists them."""

    host: str = Field(
        default="127.0.0.1",
        description="The address on which the controller listens; anything but loopback needs a token.",
    )
    port: int = Field(
        default=8400,
        ge=0,
        le=65_535,
        description="The controller's port; 0 takes a free one, which the log line `listening` names.",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="File with the controller's certificate and those that lead to its authority; the port then speaks HTTPS alone. Read again when it changes. Unset: plain HTTP.",
    )
    tls_key: Path | None = Field(
        default=None,
        description="File with that certificate's key; unset: it is in the certificate's file.",
    )
    token: SecretStr | None = Field(
        default=None,
        description="The operator's bearer token, at least 128 bits if other machines can connect. Unset: every local user is the operator.",
    )
    token_file: Path | None = Field(
        default=None, description="File that has the token, in place of `MESHLOOM_TOKEN`."
    )
    allowed_hosts: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Further names of the controller in `Host` and `Origin`, separated by commas; unset: loopback's, and with a token any.",
    )
    rate_per_s: float = Field(
        default=100,
        gt=0,
        le=1e6,
        description="Requests a second that each token may make to each controller, on average.",
    )
    rate_burst: int = Field(
        default=1000, ge=1, le=1_000_000, description="Requests that a token may make at once."
    )
    factory_prefixes: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        default=None,
        description="Entry points that jobs may name beside the built-ins, separated by commas; `*`: all. Unset: all on loopback without a token, else none.",
    )
    uploaded_code: bool | None = Field(
        default=None,
        description="Whether jobs may run uploaded code; unset: where all entry points are allowed.",
    )
    tracker_servers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Servers that jobs may name as `base_url` of W&B and `tracking_uri` of MLflow where not all entry points are allowed, separated by commas; `*`: all.",
    )
    max_code_mib: int = Field(
        default=DEFAULT_CODE_MIB,
        ge=1,
        le=MOST_CODE_MIB,
        description="The largest code archive, in MiB.",
    )
    max_code_store_mib: int = Field(
        default=DEFAULT_CODE_STORE_MIB,
        ge=1,
        le=1 << 20,
        description="All code archives together, in MiB.",
    )
    grow_after_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="Seconds for which slots must be free before an elastic job grows.",
    )
    max_streams: int = Field(
        default=64,
        ge=1,
        le=10_000,
        description="Event and log streams that the controller keeps open at a time; each takes a connection to Redis.",
    )
    max_unfinished_jobs: int = Field(
        default=2_000,
        ge=1,
        le=1_000_000,
        description="Jobs that have not ended, for each owner; a further one gets 409.",
    )
    max_unfinished_spec_bytes: int = Field(
        default=16 << 20,
        ge=MAX_SPEC_BYTES,
        le=1 << 40,
        description="Bytes of the specs of all jobs that have not ended, for each owner; a job that exceeds them gets 409. The controller may need thirty times as much memory.",
    )
    max_jobs: int = Field(
        default=50_000,
        ge=1,
        le=10_000_000,
        description="Jobs that are kept of each owner, those that have ended included; a further one gets 409.",
    )
    max_priority: int = Field(
        default=HIGHEST_PRIORITY,
        ge=0,
        le=HIGHEST_PRIORITY,
        description="The highest priority that submitters may give a job; operators may give any.",
    )
    max_connections: int = Field(
        default=512,
        ge=8,
        le=100_000,
        description="Connections that the controller keeps open; beyond it, it closes the oldest of those without a complete request or of those whose answers go unread, whichever are more.",
    )
    request_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3_600,
        description="Seconds in which a request must arrive, and in which its answer must be read.",
    )
    plan_wait_s: float = Field(
        default=5,
        ge=0,
        le=60,
        description="Seconds that a request for a plan waits before it answers 202.",
    )
    probe_timeout_s: float = Field(
        default=120,
        gt=0,
        le=3_600,
        description="Seconds that profiling a model on a node may take.",
    )
    keep_telemetry_days: float = Field(
        default=7,
        ge=0.01,
        le=3_650,
        description="Days after a job's end for which Redis keeps samples and stacks, and records that storage could not take.",
    )
    telemetry_secret: SecretStr | None = Field(
        default=None,
        description="Secret of at least 128 bits, the same for all controllers: keys of telemetry in Redis have a part that is derived from it and that only the agents of the job learn ([security](security.md#redis)). Change it while no job runs. Unset: an agent's user of Redis may write telemetry of any job.",
    )
    telemetry_secret_file: Path | None = Field(
        default=None, description="File that has it, in place of `MESHLOOM_TELEMETRY_SECRET`."
    )
    otel_endpoint: str | None = Field(
        default=None,
        description="Where traces go, by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; needs the extra `otel`. Unset: no traces.",
    )
    webhook_hosts: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Hosts of webhooks that need no public address and no TLS, separated by commas. Others need both.",
    )
    checkpoint_root: Annotated[Path | BucketAddress | None, BeforeValidator(storage_address)] = (
        Field(
            default=None,
            description="Folder of all jobs' checkpoints, as the nodes have it, or `s3://BUCKET/PREFIX`; the controller only reads it, for downloads of exports. Unset: no downloads.",
        )
    )
    pools_file: Path | None = Field(
        default=None,
        description="File that names the pools from which nodes are requested when a job fits no free node ([pools](pools.md)). Unset: nodes join by themselves.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe log lines that are written."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_secrets_of_controller(cls, values: object) -> object:
        return with_secret_files(values, "token", "telemetry_secret")

    @model_validator(mode="after")
    def _names_of_telemetry_cannot_be_guessed(self) -> Self:
        if self.telemetry_secret is not None:
            _refuse_guessable("MESHLOOM_TELEMETRY_SECRET", self.secret_of_telemetry)
        return self

    @property
    def secret_of_telemetry(self) -> str:
        """The secret of the names of telemetry; empty where there is none."""
        return "" if self.telemetry_secret is None else self.telemetry_secret.get_secret_value()

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
    def variables(self) -> Mapping[str, str]:
        """The controller's environment, for what a file of pools takes from it."""
        return dict(os.environ)

    @model_validator(mode="after")
    def _a_key_has_its_certificate(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("MESHLOOM_TLS_KEY: a key needs its certificate: set MESHLOOM_TLS_CERT")
        return self

    @property
    def entry_points(self) -> EntryPoints:
        """Which entry points and trackers jobs may name."""
        return entry_points(
            self.factory_prefixes,
            otherwise_any=self.token is None,
            uploads=self.uploaded_code,
            trackers=self.tracker_servers,
        )

    @field_validator("factory_prefixes", "tracker_servers", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("allowed_hosts", "webhook_hosts", mode="before")
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
            _refuse_guessable(
                "MESHLOOM_TOKEN",
                self.token.get_secret_value(),
                f", and other machines can reach MESHLOOM_HOST {self.host}",
            )
        return self


def _refuse_guessable(variable: str, token: str, why: str = "") -> None:
    """Refuse a secret with fewer random bits than 128, if all characters that repeat no others were random."""
    used = set(token)
    alphabet = 64
    if used <= set(string.hexdigits):
        alphabet = 10 if used <= set(string.digits) else 16
    own = _own_characters(token)
    bits = int(own * math.log2(alphabet))
    if bits < _MIN_TOKEN_BITS or len(used) < _MIN_TOKEN_LETTERS:
        repeats = f", which repeat the first {own}" if own < len(token) else ""
        raise ValueError(
            f"{variable} can be guessed: it has {len(token)} characters{repeats}, at most {bits} random "
            f"bits{why}; take one of at least {_MIN_TOKEN_BITS} bits, such as `openssl rand -hex 32` makes"
        )


def _own_characters(token: str) -> int:
    """How many characters a secret has, not counting those that only repeat its beginning again and again."""
    half = len(token) // 2
    return next((n for n in range(1, half + 1) if token[n:] == token[:-n]), len(token))


class AclSettings(BaseSettings):
    """The passwords of Redis's users, for the file that ``services.controller.acl`` prints; each may be in a file."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", frozen=True, extra="ignore")

    redis_controller_password: SecretStr = Field(min_length=MIN_PASSWORD_CHARACTERS)
    redis_controller_password_file: Path | None = None
    redis_agent_password: SecretStr | None = None
    redis_agent_password_file: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, values: object) -> object:
        return with_secret_files(values, "redis_controller_password", "redis_agent_password")
