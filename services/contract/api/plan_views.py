"""Plans as the REST API shows them, and what a job keeps of the one that it was submitted with."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from fsdp_core.plan.model import MeshPlan, ShardingPlan
from services.contract.jobs.plans import RankPlacement
from services.contract.jobs.specs import CarriedSpec, JobSpec
from services.contract.messages.probing import DeviceType
from services.contract.messages.rank_pipe import ThroughputUnit
from services.contract.words.ids import NodeId, PlanId, ProbeId
from services.contract.words.states import PlanState


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class MemoryView(_View):
    """Bytes of device memory at one moment, by what they are for.

    ``parameters``: slices, padded. ``unsharded``: whole parameters. ``whole_gradients``: as autograd
    makes them, until they are reduced. ``communication``: what is being gathered or reduced, and
    what of memory that ranks share is this rank's, but for its slices.
    ``workspace``: what operators take within themselves.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    whole_gradients: int = 0
    activations: int = 0
    communication: int = 0
    workspace: int = 0
    total: int = 0


class RankMemory(_View):
    """What each of ``ranks`` will need: at its peak, and between two steps.

    ``where`` and ``unit`` say in which phase of the step the peak is and which unit is at work
    there ("": the root, or none). Beyond 16 ranks along dp_shard the fullest speaks for all.
    """

    ranks: tuple[int, ...]
    peak: MemoryView
    where: str
    unit: str
    resting: MemoryView
    host_bytes: int = Field(0, description="of the host, for what is offloaded")


class AxisTraffic(_View):
    """What one rank sends along a mesh axis in a step. ``seconds``: without any overlap."""

    axis: str
    ranks: int
    bytes_sent: int
    collectives: int
    seconds: float | None = None


class StepTimeView(_View):
    """Seconds of a step, estimated from the node's figures; without overlap in ``total_s``.

    ``scale``: what the first steps of earlier jobs of the model took, over what was estimated for
    them; all seconds are multiplied by it. ``tokens_per_s`` counts what ``throughput_unit`` says.
    """

    compute_s: float
    optimizer_s: float
    total_s: float
    tokens_per_s: float
    throughput_unit: ThroughputUnit = "tokens"
    scale: float = 1.0


class PlanUnit(_View):
    """One unit: its modules, and how they are sharded, gathered and computed.

    ``parameters`` are counted whole, ``rank_bytes`` is what the fullest rank keeps of them.
    ``shared_memory``: how ranks of one host gather: by copies from memory that they share, or with
    one copy of the parameters for all (``storage``). null: through their process group.
    """

    modules: tuple[str, ...]
    parameters: int
    rank_bytes: int
    reshard_after_forward: bool | int
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    recompute: bool = False
    offload: bool = False
    prefetch: int | None = None
    compile: bool = False
    shared_memory: Literal["copy", "storage"] | None = None


class PlanAlternative(_View):
    """Another plan that was considered, and why it lost."""

    title: str
    mesh: MeshPlan
    micro_batch: int
    peak_bytes: int | None = None
    step_time_s: float | None = None
    fits: bool
    lost_because: str


class PlanOutcome(_View):
    """What a plan comes to. All of it is empty while its model is still probed.

    ``feasible``: it fits the memory, and known nodes could seat it. ``reasons`` say why, or why
    not; ``advice`` what to change. ``ranks``: where they would sit now; empty where there is no room
    (``placement`` says why). ``memory_limit_bytes``: what a rank may use; ``memory_reserve_bytes``: what
    is left of its GPU for the allocator's fragments and for the process itself, None on CPUs.
    """

    feasible: bool | None = None
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    device_type: DeviceType | None = None
    mesh: MeshPlan | None = None
    sharding: ShardingPlan | None = None
    micro_batch: int | None = None
    accumulation: int | None = Field(None, description="forwards and backwards of a step")
    units: tuple[PlanUnit, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    memory_limit_bytes: int | None = None
    memory_reserve_bytes: int | None = None
    traffic: tuple[AxisTraffic, ...] = ()
    step_time: StepTimeView | None = None
    model_flops: int | None = Field(
        None, description="floating-point operations of a step over all ranks, none counted twice"
    )
    peak_flops: float | None = Field(
        None, description="of a rank's device in a second, measured by large matrix products"
    )
    alternatives: tuple[PlanAlternative, ...] = ()
    ranks: tuple[RankPlacement, ...] = ()
    placement: str | None = None


class PlanFailure(_View):
    """Why there is no plan: a code for programs, the reason, and what to do."""

    code: Literal[
        "timed_out",
        "out_of_memory",
        "crashed",
        "refused",
        "raised",
        "wrong_spec",
        "no_answer",
        "search_failed",
    ]
    reason: str
    advice: str
    traceback: str | None = None


class PlanProbe(_View):
    """Where the model was profiled. ``cached``: the profile of an earlier plan was used."""

    id: ProbeId
    node_id: NodeId
    cached: bool
    took_s: float | None = None


class PlanView(PlanOutcome):
    """A plan: its state, and its result once the model is profiled."""

    id: PlanId
    state: PlanState
    reason: str
    failure: PlanFailure | None = None
    probe: PlanProbe
    owner: str
    created_at: datetime
    expires_at: datetime
    spec: CarriedSpec


class PlanSummary(_View):
    """A plan in a list. ``peak_bytes``: what its fullest rank needs; ``ranks``: how many."""

    id: PlanId
    state: PlanState
    reason: str
    feasible: bool | None = None
    name: str
    owner: str
    created_at: datetime
    expires_at: datetime
    ranks: int
    device_type: DeviceType | None = None
    mesh: MeshPlan | None = None
    micro_batch: int | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    step_time_s: float | None = None


class PlanList(_View):
    """A page of the plans of the last seven days, newest first."""

    items: tuple[PlanSummary, ...]
    next_cursor: str | None = None


class JobEstimate(_View):
    """What a job's plan estimated of its fullest rank. ``reason``: why this layout was chosen.

    ``probe_id``: where the model's profile is; ``time_scale``: that of ``step_time_s``.
    ``model_flops``: floating-point operations of a step over all ranks, forward and backward, none
    computed again counted; ``peak_flops``: how many a rank's device was measured to do in a second,
    in large matrix products.
    """

    plan_id: PlanId
    reason: str = ""
    peak: MemoryView
    where: str
    unit: str
    host_bytes: int = 0
    micro_batch: int
    step_time_s: float | None = None
    time_scale: float = 1.0
    probe_id: ProbeId | None = None
    model_flops: int | None = None
    peak_flops: float | None = None


class EstimateView(JobEstimate):
    """The same beside what the ranks of the newest attempt were seen to use.

    ``measured_peak_bytes``: the most that the steps of any rank took. ``measured_as``:
    ``resident_growth``, on CPUs, is the most that was resident in its first steps, less files,
    what the process held before it built the model, and copies for checkpoints; ``allocated``, on
    GPUs, is the most that PyTorch's allocator had given out. ``ratio``: measured to estimated; None
    if less than 64 MiB (2 MiB on GPUs) was estimated, which other things take in any process.
    ``measured_fragments_bytes``, on GPUs: the most that the allocator of any rank held over its peak.
    """

    measured_peak_bytes: int | None = None
    measured_as: Literal["resident_growth", "allocated"] | None = None
    ratio: float | None = None
    measured_fragments_bytes: int | None = None


class FromPlan(BaseModel):
    """A job by a plan: the plan's spec, with exactly its mesh and sharding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan_id: PlanId


def _kind_of_submission(body: Any) -> str:  # noqa: ANN401 whatever came as JSON
    names_plan = isinstance(body, FromPlan) or (isinstance(body, dict) and "plan_id" in body)
    return "(plan)" if names_plan else "(spec)"


Submitted = Annotated[
    Annotated[JobSpec, Tag("(spec)")] | Annotated[FromPlan, Tag("(plan)")],
    Discriminator(_kind_of_submission),
]
"""The body of ``POST /v1/jobs``: a spec, or a plan's id."""
