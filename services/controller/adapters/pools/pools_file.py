"""The file that names pools (``MESHLOOM_POOLS_FILE``), and how the agents of their nodes are started."""

import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from string import Template
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.domain.scheduling.reservations import PoolLimits
from services.controller.ports.pools import AgentProcess

# ``-p gpu`` as two words would pass ``gpu``; ``--`` would end the options, and ours stand behind.
_OPTION: Final = re.compile(r"--[a-z][a-z-]*(=.*)?|-[A-Za-z].*", re.DOTALL)


_WIND_DOWN_S: Final = 10.0
"""Of their grace, what agents keep for themselves: to kill ranks that did not move, and to say farewell."""


class PoolsFileError(ValueError):
    """The file cannot be used; the text says where and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentConfig(_Part):
    """How an agent is started on a node.

    In the values of its environment ``${node_id}`` is the node's, and ``${NAME}`` a variable of the
    controller, so that passwords need not be in the file.
    """

    command: tuple[str, ...] = Field(
        default=("python3", "-m", "services.worker.agent"),
        min_length=1,
        description="Program and arguments, as the node has them.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="The agent's settings; `${node_id}` is the node's id, `${NAME}` a variable of the controller.",
    )


class PoolConfig(_Part):
    """What all kinds of pools have."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")] = Field(
        description="The pool's; its nodes are `<name>-1`, `<name>-2` and so on."
    )
    cpu_slots: int = Field(default=0, ge=0, le=4_096, description="CPU ranks that a node takes.")
    accelerators: int = Field(default=0, ge=0, le=64, description="GPUs of a node.")
    max_nodes: int = Field(ge=1, le=10_000, description="Nodes that it has at a time, at most.")
    ready_timeout_s: float = Field(
        default=900, gt=0, le=7 * 86_400, description="Seconds in which all nodes must have joined."
    )
    idle_timeout_s: float = Field(
        default=300, gt=0, le=7 * 86_400, description="Seconds for which idle nodes are kept."
    )

    @model_validator(mode="after")
    def _brings_something(self) -> Self:
        if not self.cpu_slots and not self.accelerators:
            raise ValueError("cpu_slots or accelerators must say what a node takes")
        return self


class SlurmPoolConfig(PoolConfig):
    """Nodes by Slurm: one batch job for each reservation, one agent on each of its nodes."""

    kind: Literal["slurm"]
    options: tuple[str, ...] = Field(
        default=(),
        description="Further options of sbatch, such as `--partition=gpu`, one word each.",
    )
    bin: Path | None = Field(
        default=None, description="Folder of Slurm's commands; unset: they are in PATH."
    )
    grace_s: float = Field(
        default=60,
        ge=0,
        le=3_600,
        description="Seconds that agents have to end their gangs before they are killed.",
    )

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        # sbatch takes the first bare word for a script, which would run in place of the agents.
        wrong = [word for word in options if not _OPTION.fullmatch(word)]
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is no option of sbatch: write each as one word, such as --partition=gpu"
            )
        return options


class RayPoolConfig(PoolConfig):
    """Nodes by Ray core: one placement group for each reservation, one agent in each of its bundles."""

    kind: Literal["ray"]
    address: str = Field(
        description="Of the cluster, such as `host:6379`; the controller's machine is one of its nodes.",
        min_length=1,
        max_length=500,
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Of Ray that each node gives; unset: `{CPU: 1}`, and as many `GPU` as it has accelerators.",
    )
    grace_s: float = Field(
        default=60,
        ge=0,
        le=3_600,
        description="Seconds that agents have to end their gangs before they are killed.",
    )

    @field_validator("address")
    @classmethod
    def _is_of_the_cluster(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(
                f"{address} is not HOST:PORT of the cluster's state. Ray Client (ray://) is not used: make the "
                "controller's machine a node (ray start --address=HOST:6379 --num-cpus=0), and name HOST:6379"
            )
        return address


_OWNER_CHARACTERS = 20
"""The name of a pod's host has 63: owner, reservation and index."""
_Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")]
_ObjectName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", min_length=1, max_length=253)
]
_Folder = Annotated[str, Field(pattern=r"^(/[^/:\x00]+)+$", max_length=500)]


class Toleration(_Part):
    """A taint of nodes of Kubernetes that agents accept."""

    key: str | None = Field(default=None, description="Of the taint; unset: all.")
    operator: Literal["Exists", "Equal"] = Field(
        default="Exists", description="Whether the value counts."
    )
    value: str | None = Field(default=None, description="Of the taint, with `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Of the taint; unset: all."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("value needs operator: Equal")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator: Equal needs a key")
        return self


class KubernetesPoolConfig(PoolConfig):
    """Nodes by Kubernetes: one indexed Job for each reservation, one pod with an agent on each of its nodes."""

    kind: Literal["kubernetes"]
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)] = (
        Field(description="Of Jobs, pods and Secrets; best one for nothing else.")
    )
    image: str = Field(description="Of the agents.", min_length=1, max_length=500)
    image_pull_secrets: tuple[_ObjectName, ...] = Field(
        default=(), description="Secrets of the namespace for the image's registry."
    )
    queue: _ObjectName | None = Field(
        default=None,
        description="LocalQueue of Kueue, which admits all pods of a reservation or none. Unset: Kubernetes places pod by pod.",
    )
    priority_class: _ObjectName | None = Field(
        default=None, description="PriorityClass of the pods."
    )
    resources: dict[str, _Quantity] = Field(
        default_factory=dict,
        description="Requests and limits of each pod; unset: `cpu_slots` CPUs and as many `nvidia.com/gpu` as accelerators.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels that nodes must have."
    )
    tolerations: tuple[Toleration, ...] = Field(default=(), description="Taints that pods accept.")
    service_account: _ObjectName | None = Field(
        default=None,
        description="Of the pods, which get no token of it; unset: the namespace's default.",
    )
    claims: dict[_ObjectName, _Folder] = Field(
        default_factory=dict,
        description="PersistentVolumeClaims, and where pods have them: one must hold the checkpoints.",
    )
    scratch: tuple[_Folder, ...] = Field(
        default=("/tmp", "/var/lib/meshloom"),  # noqa: S108 a folder of each pod's own
        description="Folders that are empty at first and may be written; all else of the image is read-only.",
    )
    shared_memory: _Quantity = Field(default="8Gi", description="Size of `/dev/shm`.")
    user: int = Field(
        default=10001,
        ge=1,
        le=2**31 - 1,
        description="Number of the user and group of all processes.",
    )
    grace_s: float = Field(
        default=60,
        ge=0,
        le=3_600,
        description="Seconds that agents have to end their gangs before they are killed.",
    )
    kubeconfig: Path | None = Field(
        default=None,
        description="File with the cluster's address; unset: the controller runs in a pod of the cluster.",
    )
    context: str | None = Field(default=None, description="Of that file; unset: its current one.")

    @model_validator(mode="after")
    def _folders_differ(self) -> Self:
        folders = [*self.claims.values(), *self.scratch]
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        if twice:
            raise ValueError(f"several volumes are mounted at {', '.join(twice)}")
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("context needs a kubeconfig")
        return self


AnyPoolConfig = Annotated[
    SlurmPoolConfig | RayPoolConfig | KubernetesPoolConfig, Field(discriminator="kind")
]


class PoolsFile(_Part):
    """The whole file."""

    owner: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")] = Field(
        default="meshloom",
        description="Marks what belongs to this controller at a scheduler that others use, too.",
    )
    agent: AgentConfig = AgentConfig()
    pools: tuple[AnyPoolConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [pool.name for pool in self.pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several pools are named {', '.join(twice)}")
        if len(self.owner) > _OWNER_CHARACTERS and any(
            pool.kind == "kubernetes" for pool in self.pools
        ):
            raise ValueError(
                f"with pools of Kubernetes, owner has up to {_OWNER_CHARACTERS} characters"
            )
        return self


def read_pools_file(path: Path) -> PoolsFile:
    """The file, checked.

    Raises:
        PoolsFileError: It cannot be read, or says something that cannot be; all faults at once.
    """
    try:
        said: object = YAML(typ="safe", pure=True).load(StringIO(path.read_text()))
    except OSError as error:
        raise PoolsFileError(f"{path}: {error.strerror}") from error
    # Other than YAML says: no UTF-8, no such day, no value of its tag, too large a number, or nested too deep.
    except (YAMLError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise PoolsFileError(f"{path}: {' '.join(str(error).split())}") from error
    try:
        return PoolsFile.model_validate(said)
    except ValidationError as error:
        faults = [
            f"/{'/'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False, include_input=False)
            # Of a list it counts only what is right: a list of wrong pools would be too short, as well.
            if fault["type"] != "too_short"
            or fault["loc"] != ("pools",)
            or error.error_count() == 1
        ]
        raise PoolsFileError(f"{path}: {'; '.join(faults)}") from None


def limits_of(config: PoolConfig, kind: PoolKind) -> PoolLimits:
    """What a pool can bring."""
    return PoolLimits(
        name=config.name,
        kind=kind,
        cpu_slots=config.cpu_slots,
        accelerators=config.accelerators,
        max_nodes=config.max_nodes,
        ready_timeout_s=config.ready_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )


def agents_of(
    config: AgentConfig, limits: PoolLimits, grace_s: float, variables: Mapping[str, str]
) -> Mapping[NodeId, AgentProcess]:
    """How the agents of a pool's nodes are started, by node.

    Args:
        config: As the file says it.
        limits: Of the pool.
        grace_s: Seconds from the moment at which agents are told to end until they are killed.
        variables: Of the controller's environment.

    Raises:
        PoolsFileError: A value names a variable that is not set.
    """
    common = {"MESHLOOM_STOP_GRACE_S": f"{max(grace_s - _WIND_DOWN_S, 0):g}"}
    if limits.cpu_slots:
        common["MESHLOOM_CPU_SLOTS"] = str(limits.cpu_slots)
    return {node_id: _agent(config, node_id, common, variables) for node_id in limits.node_ids}


def _agent(
    config: AgentConfig, node_id: NodeId, common: Mapping[str, str], variables: Mapping[str, str]
) -> AgentProcess:
    environment = {"MESHLOOM_NODE_ID": node_id, **common}
    for name, value in config.environment.items():
        try:
            environment[name] = Template(value).substitute(variables, node_id=node_id)
        except (KeyError, ValueError) as error:
            raise PoolsFileError(
                f"/agent/environment/{name}: {error} is no variable of the controller"
            ) from error
    return AgentProcess(config.command, environment)
