"""The resources of the REST API as they travel: what the controller answers and clients read."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fsdp_core.plan.model import MeshPlan, NodeFacts
from services.contract.api.plan_views import EstimateView
from services.contract.jobs.code_archives import CodeDigest
from services.contract.jobs.plans import GangPlan
from services.contract.jobs.spec_parts import WorldSpec
from services.contract.jobs.specs import CarriedSpec
from services.contract.messages.facts import Inventory
from services.contract.messages.rank_pipe import LossUnit, ThroughputUnit
from services.contract.messages.telemetry import LogLine, RankStacks, StepRecord
from services.contract.words.ids import CheckpointId, JobId, NodeId
from services.contract.words.states import (
    CheckpointState,
    ExitReason,
    FailureClass,
    JobState,
    NodeState,
)


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class Progress(_View):
    """How far a job is. ``eta_s`` from the median of the last step times.

    ``of`` is null as long as a script has not told how many steps it makes.
    ``tokens_per_s`` counts what ``throughput_unit`` says; the losses of the job, validation's too,
    are in ``loss_unit``: nats a token, or none that is known. ``metrics``: the newest values of the user's
    metrics, by name. ``mfu``: model FLOPs utilisation of the newest step, from 0 to 1.
    """

    step: int = 0
    of: int | None
    loss: float | None = None
    tokens_per_s: float | None = None
    throughput_unit: ThroughputUnit = "tokens"
    loss_unit: LossUnit = "nats"
    step_time_s: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float | None] = {}


class Evaluation(_View):
    """A validation pass: mean loss, and for comparison the losses of simple models.

    ``tokens``: over how many, or over how many samples. A loss that is no finite number is null.
    """

    step: int
    loss: float | None
    tokens: int
    baselines: dict[str, float] = {}
    metrics: dict[str, float | None] = Field({}, description="the user's, at most 16")


class FailureView(_View):
    """What ended an attempt: the first rank to fail, and its error."""

    rank: int | None = None
    node_id: NodeId | None = None
    phase: str | None = None
    step: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None
    traceback: str | None = None


class ReplicasView(_View):
    """The replicas of an attempt that continues without lost ones."""

    count: int = Field(description="how many the mesh has")
    present: int = Field(description="how many take part now; 0 until all have begun")
    lost: int = Field(description="how often one was lost")
    returned: int = Field(description="how often one came back")


class AttemptView(_View):
    """One numbered attempt of a job, and its times in seconds, where they are known.

    ``time_to_detect_s``: from the first rank's exit, or the last message of a lost node, until the
    controller decided. ``time_to_restart_s``: from there to the next attempt, if the job restarted
    by itself. ``time_to_first_step_s``: from the launch command to the first step.
    """

    fence: int
    world_size: int
    mesh: MeshPlan | None = None
    node_ids: tuple[NodeId, ...]
    resumed_from: CheckpointId | None = None
    started_at: datetime
    first_step_at: datetime | None = None
    ended_at: datetime | None = None
    first_step: int | None = None
    last_step: int | None = None
    lost_steps: int | None = None
    exit_reason: ExitReason | None = None
    failure: FailureView | None = None
    time_to_detect_s: float | None = None
    time_to_restart_s: float | None = None
    time_to_first_step_s: float | None = None
    replicas: ReplicasView | None = Field(
        None, description="null: the loss of any rank ends the attempt"
    )


class CloneOrigin(_View):
    """The job of which this one is a clone, and the checkpoint and step from which it starts."""

    job_id: JobId
    checkpoint_id: CheckpointId | None = None
    step: int = 0


class JobView(_View):
    """A job: its spec, its state and the reason for it, and its progress."""

    id: JobId
    name: str
    state: JobState
    reason: str | None = Field(None, description="why it is in this state")
    exit_reason: ExitReason | None = None
    failure: FailureView | None = None
    progress: Progress
    telemetry_away: bool = Field(
        default=False,
        description="whether the Redis for telemetry does not answer, or nothing of ranks that train has come "
        "there for half a minute, as from agents that write to another one: progress is then what the job's record has",
    )
    evaluation: Evaluation | None = None
    attempt: int = Field(0, description="number of the newest attempt, its fence; 0 before")
    restarts: int = 0
    world_size: int = Field(
        1, description="ranks of the newest attempt; before the first one, how many it needs"
    )
    world: WorldSpec | None = Field(None, description="the bounds of an elastic job")
    replicas: ReplicasView | None = Field(
        None, description="those of the newest attempt, if it continues without lost ones"
    )
    plan: GangPlan | None = None
    estimate: EstimateView | None = Field(
        None, description="what its plan estimated, and what was measured; null without a plan_id"
    )
    latest_checkpoint: CheckpointId | None = None
    cloned_from: CloneOrigin | None = None
    revision: int = Field(0, description="how often people changed it; the ETag begins with it")
    priority: int = 0
    labels: dict[str, str] = {}
    owner: str = "local"
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec: CarriedSpec


class JobPage(_View):
    """A page of jobs, newest first."""

    items: tuple[JobView, ...]
    next_cursor: str | None = None


class SparseJobPage(_View):
    """A page of jobs with only the requested fields, and ``id``."""

    items: tuple[dict[str, Any], ...]
    next_cursor: str | None = None


class RankView(_View):
    """One rank of the newest attempt, from its board. Memory in bytes, times in seconds."""

    rank: int
    local_rank: int
    node_id: NodeId
    device: str
    pid: int | None = None
    phase: str
    unit: str | None = None
    step: int = 0
    step_time_s: float | None = None
    data_wait_s: float | None = Field(
        None, description="of step_time_s, what the rank waited for its data"
    )
    arrival_lag_s: float | None = Field(
        None, description="how much later than the first rank it issues a collective, on average"
    )
    straggler_score: float | None = Field(
        None,
        description="share of the time in which it was late at a collective that most ranks had "
        "issued",
    )
    is_straggler: bool = Field(
        default=False,
        description="the job is RUNNING, and this rank costs it 10 % of the step or more: its score is "
        "the highest, and that far above the median of the other ranks",
    )
    collectives_behind: int = Field(0, description="behind the foremost rank of its groups")
    loss: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int = Field(
        0,
        description="after the last step: on CPUs all that is resident of the process, on GPUs the "
        "most that PyTorch's allocator had given out",
    )
    peak_bytes: int | None = Field(
        None, description="the most that its steps took, without the process itself"
    )
    fragments_bytes: int | None = Field(
        None, description="on GPUs what PyTorch's allocator held over that, as fragments"
    )
    issued: dict[str, int] = {}
    completed: dict[str, int] = {}
    last_seen_at: datetime | None = None
    beat_age_s: float | None = None


class RankList(_View):
    """All ranks of the newest attempt, by number. ``throughput_unit``: what ``tokens_per_s`` counts."""

    attempt: int
    throughput_unit: ThroughputUnit = "tokens"
    items: tuple[RankView, ...]


class DiagnosisView(_View):
    """What is wrong with an attempt, or what ended it: the verdict, its evidence, and what to do.

    ``rank`` is the first one in trouble, None where no single rank is. ``live`` says that it was
    made of running ranks. ``stacks`` are present if ranks were inspected.
    """

    job_id: JobId
    attempt: int
    at: datetime
    live: bool
    verdict: FailureClass
    rank: int | None = None
    node_id: NodeId | None = None
    summary: str
    evidence: tuple[str, ...] = ()
    advice: str
    stacks: tuple[RankStacks, ...] = ()


class EventView(_View):
    """Something that happened to a job. ``id`` resumes a stream (``Last-Event-ID``)."""

    id: str
    at: datetime
    job_id: JobId
    kind: str = Field(description="such as job.queued, attempt.started, checkpoint.committed")
    message: str
    actor: str
    request_id: str | None = None
    data: dict[str, Any] = {}


class EventPage(_View):
    """Events, oldest first."""

    items: tuple[EventView, ...]
    next_cursor: str | None = None


class LogView(LogLine):
    """A line of output. ``id`` resumes a stream (``Last-Event-ID``)."""

    id: str


class LogPage(_View):
    """Log lines, oldest first."""

    items: tuple[LogView, ...]
    next_cursor: str | None = None


class StepView(StepRecord):
    """A training step.

    ``mfu``: model FLOPs utilisation, from 0 to 1: the floating-point operations that forward and
    backward of the model need, none computed again counted, over those that its devices could have
    made in the step's time (PaLM, arXiv:2204.02311, appendix B). The operations are those of the
    model's profile, the devices' peak is measured by large matrix products. None where either is not
    known.
    """

    mfu: float | None = None


class MetricPoint(_View):
    """A user metric at a step; names of validation begin with ``validation/``."""

    step: int
    fence: int
    values: dict[str, float | None]


class _OfMetrics(_View):
    """What answers on metrics have in common."""

    evaluations: tuple[Evaluation, ...] = ()
    total: int = Field(description="records in the range before downsampling")
    names: tuple[str, ...] = Field(
        (),
        description="the user's metrics, at most 64; request each by `name`",
    )
    names_left_out: int = Field(0, description="further names, which are not kept")
    throughput_unit: ThroughputUnit = Field("tokens", description="what `tokens_per_s` counts")
    loss_unit: LossUnit = Field(
        "nats", description="nats a token, or empty where the loss has no known unit"
    )


class MetricsView(_OfMetrics):
    """Training steps, oldest first, at most ``max_points`` of them, the first and last kept.

    ``user_metrics``: as many points of the user's metrics.
    """

    items: tuple[StepView, ...]
    user_metrics: tuple[MetricPoint, ...] = ()


class MetricsPart(_OfMetrics):
    """The same with only the requested metrics, beside ``step`` and ``fence``."""

    items: tuple[dict[str, int | float | None], ...]


class ShardView(_View):
    """One rank's file of a checkpoint."""

    rank: int
    name: str
    bytes: int
    sha256: str


class ExportView(_View):
    """The last export of a checkpoint. ``folder`` is below the storage root."""

    state: Literal["RUNNING", "DONE", "FAILED"]
    folder: str
    files: tuple[str, ...] = ()
    bytes: int = 0
    reason: str | None = None


class CheckpointView(_View):
    """A checkpoint. Jobs resume only from COMMITTED ones.

    ``verified_at``: when a node last read every file and found what was committed. ``checked_at``:
    when a node last finished reading, with either result. ``held_by``: jobs that begin from it.
    ``corrupt_file``: below the job's folder, what differs or is missing. ``evaluation``: the
    validation ``loss`` after its step, and metrics; empty without a pass at it. ``best``: of the
    job's, by ``checkpoint.keep_best``, else by the validation loss.
    """

    id: CheckpointId
    job_id: JobId
    state: CheckpointState
    step: int
    fence: int
    world_size: int
    bytes: int = 0
    loss: float | None = None
    evaluation: dict[str, float | None] = {}
    best: bool = False
    reason: str | None = None
    votes: int = 0
    shards: tuple[ShardView, ...] = ()
    created_at: datetime
    committed_at: datetime | None = None
    verified_at: datetime | None = None
    checked_at: datetime | None = None
    corrupt_file: str | None = None
    pinned: bool = False
    held_by: tuple[JobId, ...] = ()
    export: ExportView | None = None


class CheckpointList(_View):
    """A job's checkpoints, newest first."""

    items: tuple[CheckpointView, ...]


class MeasuredView(_View):
    """The figures that a node last measured of its devices, or why there are none."""

    facts: NodeFacts | None = None
    failure: str | None = None
    measured_at: datetime


class NodeView(_View):
    """A node: its resources, whether its lease is valid, the ranks that it runs.

    ``measured``, by type of device, is known once a plan has asked for it.
    """

    id: NodeId
    state: NodeState
    inventory: Inventory
    cpu_slots_used: int = 0
    accelerators_used: int = 0
    jobs: tuple[JobId, ...] = ()
    joined_at: datetime
    lease_s: float | None = Field(None, description="seconds until the lease expires")
    measured: dict[str, MeasuredView] = {}


class NodeList(_View):
    """A page of the known nodes, by name."""

    items: tuple[NodeView, ...]
    next_cursor: str | None = None


class AttemptList(_View):
    """A job's attempts, oldest first: the first one and the newest 20.

    ``left_out``: how many between them are no longer kept.
    """

    items: tuple[AttemptView, ...]
    left_out: int = 0


class StopRequest(_View):
    """How to stop: the body of pause and cancel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: Literal["required", "best_effort", "none"] = "best_effort"
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0


class ResumeRequest(_View):
    """From where to resume: a checkpoint of the job, or its latest committed one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_checkpoint: CheckpointId | None = None


class Health(_View):
    """Liveness or readiness. ``checks`` has the status of each part."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}


class UnreadableList(_View):
    """Records in the store that this version cannot read: keys, with the field or entry where one is meant.

    ``left_out``: how many more there are.
    """

    items: tuple[str, ...]
    left_out: int = 0


class Version(_View):
    """The version of the controller that answers."""

    version: str
    api: str = "v1"


class CodeView(_View):
    """An uploaded archive of code, by its digest. Only nodes read its content."""

    digest: CodeDigest
    bytes: int
    files: int
    unpacked_bytes: int
    uploaded_by: str
    uploaded_at: datetime
