"""The agent's settings and the environment of its ranks, read from the environment once."""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.contract.ids import NodeId
from services.worker.agent.processes import NODE_MARK

_OURS: Final = "MESHLOOM_"
_INTERFACE_NAMES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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
    """

    model_config = SettingsConfigDict(env_prefix=_OURS, extra="ignore", frozen=True)

    redis_url: str
    node_id: NodeId = Field(default_factory=_node_id_of_this_host)
    home: Path = Path(".meshloom")
    checkpoint_root: Path = Path()
    cpu_slots: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=0)
    address: str | None = None
    user_path: Annotated[tuple[Path, ...], NoDecode] = (Path(),)
    trainer: str = "services.worker.rank.trainer:train"

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

    @field_validator("user_path", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(p for p in value.split(os.pathsep) if p) if isinstance(value, str) else value

    @field_validator("user_path")
    @classmethod
    def _all_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().absolute() for path in value)


def sentinel_environment() -> dict[str, str]:
    """The environment of the process that ends what the agent leaves: nothing of ours."""
    return {name: value for name, value in os.environ.items() if not _is_private(name, value)}


def rank_environment(
    user_path: tuple[Path, ...], mark: str, interface: str | None
) -> dict[str, str]:
    """The environment of the warm process and so of all ranks and whatever they start.

    Nothing of ours is in it but ``mark``, by which processes of this node are found again, and
    nothing that looks like a credential: ranks run what a user wrote. Their collectives use the
    network ``interface``, unless the environment names another.
    """
    kept = {name: value for name, value in os.environ.items() if not _is_private(name, value)}
    path = [str(entry) for entry in user_path]
    if kept.get("PYTHONPATH"):
        path.insert(0, kept["PYTHONPATH"])
    # Libraries that start their threads when they are loaded would make the forks unsafe; each
    # rank sets the number that its seat allows.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Left alone, gloo takes what the host's name resolves to, which others may not reach.
    network = {} if interface is None else dict.fromkeys(_INTERFACE_NAMES, interface)
    return {**network, **kept, **threads, "PYTHONPATH": os.pathsep.join(path), NODE_MARK: mark}


def _is_private(name: str, value: str) -> bool:
    return (
        name.startswith(_OURS)
        or _CREDENTIAL_NAME.search(name.upper()) is not None
        or _CREDENTIAL_VALUE.search(value) is not None
    )
