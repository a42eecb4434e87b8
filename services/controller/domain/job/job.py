"""A job's record."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from pydantic import Field

from services.contract.api.plan_views import JobEstimate
from services.contract.api.views import Evaluation
from services.contract.jobs.plans import GangPlan
from services.contract.jobs.spec_parts import KeepBestSpec
from services.contract.jobs.specs import CarriedSpec
from services.contract.messages.rank_pipe import LossUnit, ThroughputUnit
from services.contract.words.ids import CheckpointId, JobId, PlanId
from services.contract.words.states import TERMINAL_STATES, CheckpointState, ExitReason, JobState
from services.controller.domain.job.attempt import Attempt, Failure
from services.controller.domain.job.checkpoint import Checkpoint, best_of
from services.controller.domain.job.trace import Trace
from services.controller.domain.record import Record, is_ahead

RESUMABLE_STATES: Final = frozenset({JobState.PAUSED, JobState.FAILED, JobState.CANCELLED})
_MIGRATABLE_STATES: Final = frozenset({JobState.PLACING, JobState.STARTING, JobState.RUNNING})
WAITING_STATES: Final = frozenset({JobState.QUEUED, JobState.RESTARTING})
SEVERITY: Final[Mapping[str, int]] = {"move": 0, "pause": 1, "cancel": 2, "kill": 3}


class Stop(Record):
    """A request to stop that has not been fulfilled yet. It may only get more severe.

    ``move`` is the controller's own: the gang drains, and the job goes on elsewhere or later.
    ``cause`` and ``by`` say for what: a job (its id) that needs the room, a node that is drained, or
    another number of ranks.
    """

    kind: Literal["move", "pause", "cancel", "kill"]
    checkpoint: Literal["required", "best_effort", "none"] = "best_effort"
    grace_s: float = 60.0
    asked_ms: int
    cause: Literal["preempted", "node_drained", "resized"] | None = None
    by: str | None = None


class Origin(Record):
    """The job of which this one is a clone, and the checkpoint of it with which the clone begins.

    ``held``: the source keeps that checkpoint, for the clone has none of its own yet. ``found``: a node told of it.
    """

    job_id: JobId
    checkpoint_id: CheckpointId | None = None
    step: int = 0
    held: bool = False
    found: bool = False


class Planning(Record):
    """What a job's layout, which it leaves open, waits for.

    ``plan_id``: the plan that is made. ``again``: nobody had answered to the one before.
    """

    plan_id: PlanId | None = None
    again: bool = False


class Job(Record):
    """All that is decided about a job. Times in milliseconds of Redis's clock.

    ``run_fence`` is the newest fence when the job was last resumed: attempts above it belong to
    the present run, whose restarts are counted. ``base_checkpoint`` is the one that a person named
    to resume from: of older attempts' checkpoints (up to ``base_fence``), only that one counts.
    ``gone`` remembers checkpoints that were removed from the index, so that a repeated fact does
    not bring them back. ``damaged_records`` are numbers of its commit chain that cannot be read.
    ``revision`` counts what people changed of the spec. ``holds`` names, by
    checkpoint, the clones that still begin with it: retention keeps it for them. ``purge_node`` is
    the node whose agent removes all that storage holds of the job. ``readers``: the nodes that were last asked to
    verify or export a checkpoint. ``attempts``: the first one and
    the newest; ``attempts_left_out`` counts those in between that are no longer kept. ``estimate``:
    the plan's figures, by which it runs. ``found``: storage told of it, and its ranks may still
    train. ``throughput_unit`` and ``loss_unit``: as its ranks told. ``planning``: its layout is still to be chosen. ``asked``: its spec as far as it was open
    before that. ``traces``: the newest ones, oldest first. ``waiting_fence``: the newest fence when its
    event log last said why it waits for slots: once after each attempt, for the reason changes with the queue.
    """

    id: JobId
    spec: CarriedSpec
    state: JobState = JobState.QUEUED
    reason: str | None = None
    exit_reason: ExitReason | None = None
    failure: Failure | None = None
    owner: str = "local"
    created_ms: int
    updated_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    fence: int = 0
    run_fence: int = 0
    attempts: tuple[Attempt, ...] = ()
    attempts_left_out: int = 0
    plan: GangPlan | None = None
    estimate: JobEstimate | None = None
    planning: Planning | None = None
    asked: CarriedSpec | None = None
    restarts: int = 0
    not_before_ms: int = 0
    waiting_fence: int = 0
    stop: Stop | None = None
    base_checkpoint: CheckpointId | None = None
    base_fence: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    throughput_unit: ThroughputUnit = "tokens"
    loss_unit: LossUnit = "nats"
    commanded_ms: int = 0
    gone: tuple[CheckpointId, ...] = ()
    damaged_records: tuple[int, ...] = ()
    revision: int = 0
    origin: Origin | None = None
    found: bool = False
    purge_node: str | None = None
    readers: tuple[str, ...] = ()
    holds: dict[CheckpointId, tuple[JobId, ...]] = Field(default_factory=dict)
    traces: tuple[Trace, ...] = ()
    checkpoints: dict[CheckpointId, Checkpoint] = Field(default_factory=dict, exclude=True)

    @property
    def is_terminal(self) -> bool:
        """Whether nothing happens to it any more by itself."""
        return self.state in TERMINAL_STATES

    @property
    def is_active(self) -> bool:
        """Whether something is still to happen to it without a person's request."""
        return not self.is_terminal and self.state != JobState.PAUSED

    @property
    def can_migrate(self) -> bool:
        """Whether its gang lives and nobody has asked it to stop."""
        attempt = self.attempt
        return (
            attempt is not None
            and not attempt.is_over
            and self.stop is None
            and self.state in _MIGRATABLE_STATES
        )

    def rewound(self, now_ms: int) -> "Job":
        """The job, with its moments set back as the clock of Redis was; itself if it was not.

        No moment but ``not_before_ms`` is later than its last change, and that by the longest wait
        at most. So what it waits for is waited for as long as it would have been.
        """
        if not is_ahead(self.updated_ms, now_ms):
            return self
        back_ms = self.updated_ms - now_ms
        stop = self.stop
        if stop is not None:
            stop = stop.model_copy(update={"asked_ms": stop.asked_ms - back_ms})
        moments = {
            "updated_ms": now_ms,
            "not_before_ms": max(self.not_before_ms - back_ms, 0),
            "commanded_ms": max(self.commanded_ms - back_ms, 0),
            "stop": stop,
            "traces": tuple(trace.set_back(back_ms) for trace in self.traces),
        }
        return self.model_copy(update=moments)

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt, unless it has ended."""
        newest = self.attempts[-1] if self.attempts else None
        return None if newest is None or newest.ended_ms is not None else newest

    @property
    def head_node(self) -> str | None:
        """The node of rank 0 of the newest attempt."""
        return None if self.plan is None else self.plan.ranks[0].node_id

    @property
    def attempt_nodes(self) -> frozenset[str]:
        """The nodes of all attempts that are kept."""
        return frozenset(node for attempt in self.attempts for node in attempt.incarnations)

    def ranks_on(self, node_id: str) -> frozenset[int]:
        """The ranks that the newest attempt has on a node."""
        return (
            frozenset() if self.plan is None else self.plan.ranks_by_node.get(node_id, frozenset())
        )

    @property
    def has_lost_its_checkpoints(self) -> bool:
        """Whether it had checkpoints to go on from and all of them are corrupt."""
        corrupt = any(c.state == CheckpointState.CORRUPT for c in self.checkpoints.values())
        return corrupt and self.latest_checkpoint is None

    def is_on_line(self, checkpoint: Checkpoint) -> bool:
        """Whether the job may go on from it: not if a person went back behind it."""
        return checkpoint.fence > self.base_fence or checkpoint.id == self.base_checkpoint

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The committed checkpoint from which the next attempt goes on."""
        line = [
            c
            for c in self.checkpoints.values()
            if c.state == CheckpointState.COMMITTED and self.is_on_line(c)
        ]
        return max(line, key=lambda c: (c.step, c.fence), default=None)

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best committed one by ``checkpoint.keep_best``, else by the validation loss."""
        line = [c for c in self.checkpoints.values() if self.is_on_line(c)]
        best = best_of(line, self.spec.checkpoint.keep_best or KeepBestSpec())
        return best[0] if best else None

    @property
    def resume_point(self) -> "ResumePoint":
        """Where the next attempt begins: the latest own commit, else the one it was cloned from."""
        latest = self.latest_checkpoint
        if latest is not None:
            return ResumePoint(latest.id, latest.step)
        if self.origin is not None and self.origin.held:
            return ResumePoint(self.origin.checkpoint_id, self.origin.step)
        return ResumePoint(None, 0)


class ResumePoint(NamedTuple):
    """A checkpoint and its step; None and 0: the beginning."""

    checkpoint_id: CheckpointId | None
    step: int

    @property
    def words(self) -> str:
        """Where that is, in words."""
        return "from the beginning" if self.checkpoint_id is None else f"from step {self.step}"
