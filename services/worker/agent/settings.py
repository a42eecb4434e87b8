"""The agent's settings and the environment of its ranks, read from the environment once."""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.contract.jobs.entry_points import entry_points
from services.contract.messages.warm_channel import NODE_MARK
from services.contract.redis.redis_address import redis_address
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import NodeId
from services.worker.agent.ranks.admission import Admission

_OURS: Final = "MESHLOOM_"
_INTERFACE_NAMES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PASSED_ON: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
        *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    }
)
_PASSED_ON_PREFIXES: Final = (
    *("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ATEN_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "NVTE_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_"),
)
_CREDENTIAL_NAME: Final = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PRIVATE|(API|ACCESS|ACCOUNT|SSH|SIGNING)_?KEY|^KEY$"
)
_CREDENTIAL_VALUE: Final = re.compile(r"://[^/\s@]*:[^/\s@]+@|[?&](password|token)=")


def _node_id_of_this_host() -> str:
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")
    return name[:63].strip("-.") or "node"


class AgentSettings(BaseSettings):
    """The agent's settings; each is an environment variable ``MESHLOOM_<NAME>``.

    ``home`` holds the node's files (logs of ranks, records of attempts). ``checkpoint_root`` is
    the storage of all jobs' checkpoints, shared by all nodes. ``cpu_slots`` is how many CPU ranks
    the node takes at a time. ``user_path`` (separated like PATH) is where user models are found.
    ``address`` is where other nodes reach this one; by default the one from which it reaches Redis.
    ``redis_ca``, ``redis_cert`` and ``redis_key`` are files for a ``redis_url`` of ``rediss://``.
    ``factory_prefixes`` (by commas) are the entry points that jobs may name; unset, all that can be
    imported. ``uploaded_code`` says whether jobs may run uploaded code; unset, where all may be named.
    ``secrets_dir`` holds a file for each secret that specs may refer to. ``data_roots``
    (like PATH; the user path by default) are where built-in data sources read. ``rank_env`` (by
    commas) names variables that ranks get beside those that computing needs. ``template_linger_s`` is
    how long the process that has imported torch waits for the next agent, should this one be killed.
    ``rank_user`` is the system user of ranks and probes; for that the agent must run as root.
    """

    model_config = SettingsConfigDict(env_prefix=_OURS, extra="ignore", frozen=True)

    redis_url: str
    redis_ca: Path | None = None
    redis_cert: Path | None = None
    redis_key: Path | None = None
    node_id: NodeId = Field(default_factory=_node_id_of_this_host)
    home: Path = Path(".meshloom")
    checkpoint_root: Path = Path()
    cpu_slots: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=0)
    address: str | None = None
    user_path: Annotated[tuple[Path, ...], NoDecode] = (Path(),)
    factory_prefixes: Annotated[tuple[str, ...] | None, NoDecode] = None
    uploaded_code: bool | None = None
    secrets_dir: Path | None = None
    data_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    rank_env: Annotated[frozenset[str], NoDecode] = frozenset()
    rank_user: str | None = None
    template_linger_s: float = Field(default=20.0, ge=0, le=3600)
    trainer: str = "services.worker.rank.loop.trainer:train"

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("checkpoint_root")
    @classmethod
    def _below_home_by_default(cls, value: Path, info: ValidationInfo) -> Path:
        if value == Path():
            return Path(info.data.get("home", Path())) / "checkpoints"
        return value.expanduser().absolute()

    @field_validator("rank_user")
    @classmethod
    def _can_be_become(cls, value: str | None) -> str | None:
        if value is not None:
            RankUser.named(value)
            if os.geteuid() != 0:
                raise ValueError(
                    "only an agent that runs as root can run ranks as another user; start it as "
                    "root, or leave MESHLOOM_RANK_USER out"
                )
        return value

    @property
    def ranks_are(self) -> RankUser | None:
        """The system user of ranks; None: the agent's own."""
        return None if self.rank_user is None else RankUser.named(self.rank_user)

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
    def admission(self) -> Admission:
        """What jobs may have on this node."""
        return Admission(
            factories=entry_points(
                self.factory_prefixes, otherwise_any=True, uploads=self.uploaded_code
            ),
            secrets=self.secrets_dir,
            data_roots=self.data_roots or self.user_path,
        )

    @field_validator("factory_prefixes", "rank_env", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        return [p.strip() for p in value.split(",")] if isinstance(value, str) else value

    @field_validator("user_path", "data_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(p for p in value.split(os.pathsep) if p) if isinstance(value, str) else value

    @field_validator("user_path", "data_roots")
    @classmethod
    def _all_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().absolute() for path in value)


def sentinel_environment() -> dict[str, str]:
    """The environment of the process that ends what the agent leaves: nothing of ours."""
    return {name: value for name, value in os.environ.items() if _is_passed_on(name, value)}


def rank_environment(settings: AgentSettings, mark: str, interface: str | None) -> dict[str, str]:
    """The environment of the warm process and so of all ranks and whatever they start.

    What is on the list of things that computing needs and does not look like a credential, what
    ``settings.rank_env`` names, and ``mark``, by which processes of this node are found again: ranks
    run what a user wrote. Their collectives use the network ``interface``, unless the environment
    names another.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if _is_passed_on(name, value) or (name in settings.rank_env and not name.startswith(_OURS))
    }
    # Libraries that start their threads when they are loaded would make the forks unsafe; each
    # rank sets the number that its seat allows.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Left alone, gloo takes what the host's name resolves to, which others may not reach.
    network = {} if interface is None else dict.fromkeys(_INTERFACE_NAMES, interface)
    return {**network, **kept, **threads, NODE_MARK: mark}


def _is_passed_on(name: str, value: str) -> bool:
    return (
        (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))
        and _CREDENTIAL_NAME.search(name.upper()) is None
        and _CREDENTIAL_VALUE.search(value) is None
    )
