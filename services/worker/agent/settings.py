"""The agent's settings and the environment of its ranks, read from the environment once."""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import NoDecode

from services.contract.jobs.entry_points import entry_points
from services.contract.messages.warm_channel import NODE_MARK
from services.contract.redis.redis_settings import RedisSettings
from services.contract.storage.storage_address import BucketAddress, storage_address
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import NodeId
from services.worker.agent.ranks.admission import Admission

_OURS: Final = "MESHLOOM_"
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


class AgentSettings(RedisSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; docs/configuration.md lists them."""

    node_id: NodeId = Field(
        default_factory=_node_id_of_this_host,
        description="The node's name; unset: made of the host's name.",
    )
    home: Path = Field(
        default=Path(".meshloom"),
        description="Folder of the node's files: logs of ranks, records of attempts.",
    )
    checkpoint_root: Annotated[Path | BucketAddress, BeforeValidator(storage_address)] = Field(
        default=Path(),
        description="Folder of all jobs' checkpoints, which all nodes share, or `s3://BUCKET/PREFIX` ([operations](operations.md#checkpoints-in-a-bucket)); unset: `checkpoints` in the home folder.",
    )
    checkpoint_copies_gib: float = Field(
        default=64.0,
        ge=0,
        le=1 << 20,
        description="GiB that copies of shards may take on this node where checkpoints lie in a bucket, beside those that ranks write or load.",
    )
    cpu_slots: int = Field(
        default_factory=lambda: max(2, os.cpu_count() or 1),
        ge=0,
        le=65_536,
        description="CPU ranks that the node runs at a time; unset: its cores, at least 2.",
    )
    address: str | None = Field(
        default=None,
        description="Where other nodes reach this one, for gangs over several nodes; unset: the first address of the interface, or the address from which it reaches Redis.",
    )
    interface: str | None = Field(
        default=None,
        description="The network interface by which ranks of this node meet those of others; unset: the one that has the address.",
    )
    user_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(Path(),),
        description="Folders, separated by `:`, from which jobs import code; unset: the current one.",
    )
    factory_prefixes: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        default=None,
        description="Entry points that jobs may name beside the built-ins, separated by commas; unset: all that can be imported.",
    )
    uploaded_code: bool | None = Field(
        default=None,
        description="Whether jobs may run uploaded code; unset: where all entry points are allowed.",
    )
    tracker_servers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Servers that jobs may name as `base_url` of W&B and `tracking_uri` of MLflow where not all entry points are allowed, separated by commas; `*`: all.",
    )
    secrets_dir: Path | None = Field(
        default=None, description="Folder with a file for each secret that specs may name."
    )
    data_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Folders, separated by `:`, from which built-in data sources read; unset: the user path, but for the home and the storage in it.",
    )
    rank_env: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Further environment variables that ranks get, separated by commas.",
    )
    rank_user: str | None = Field(
        default=None,
        description="The system user of ranks, for an agent that runs as root; unset: the agent's.",
    )
    template_linger_s: float = Field(
        default=20.0,
        ge=0,
        le=3600,
        description="Seconds for which the process that has imported torch waits for the next agent after a crash.",
    )
    measure_idle_s: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="Seconds without ranks after which the agent measures what the node's devices do, once for the same hardware and versions; 0: when the first plan asks.",
    )
    stop_grace_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Seconds in which gangs write a checkpoint and move elsewhere when the agent is asked to end (SIGTERM); 0: they are killed at once.",
    )
    trainer: str = Field(
        default="services.worker.rank.loop.trainer:train",
        description="The function that each rank runs, as module:callable.",
    )

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("checkpoint_root")
    @classmethod
    def _below_home_by_default(
        cls, value: Path | BucketAddress, info: ValidationInfo
    ) -> Path | BucketAddress:
        if isinstance(value, BucketAddress):
            return value
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
    def checkpoint_folder(self) -> Path:
        """Where this node has checkpoints as files: those of all nodes, or its copies of what a bucket has."""
        if isinstance(self.checkpoint_root, BucketAddress):
            return self.home / "copies" / self.node_id
        return self.checkpoint_root

    @property
    def most_copies_bytes(self) -> int:
        """Of copies of shards that a bucket has."""
        return int(self.checkpoint_copies_gib * (1 << 30))

    @property
    def ranks_are(self) -> RankUser | None:
        """The system user of ranks; None: the agent's own."""
        return None if self.rank_user is None else RankUser.named(self.rank_user)

    @property
    def admission(self) -> Admission:
        """What jobs may have on this node."""
        return Admission(
            factories=entry_points(
                self.factory_prefixes,
                otherwise_any=True,
                uploads=self.uploaded_code,
                trackers=self.tracker_servers,
            ),
            secrets=self.secrets_dir,
            data_roots=self.data_roots or self.user_path,
            private=(self.home.absolute(), self.checkpoint_folder.absolute()),
        )

    @field_validator("factory_prefixes", "tracker_servers", "rank_env", mode="before")
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
    network = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    if interface is not None:
        # Without "=", NCCL takes eth1 for the beginning of a name, such as that of eth10.
        network["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {**network, **kept, **threads, NODE_MARK: mark}


def _is_passed_on(name: str, value: str) -> bool:
    return (
        (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))
        and _CREDENTIAL_NAME.search(name.upper()) is None
        and _CREDENTIAL_VALUE.search(value) is None
    )
