"""The words for where a job, a rank, a checkpoint, a trace and a node stand."""

from enum import IntEnum, StrEnum


class JobState(StrEnum):
    """The state of a job (the transitions are in ``services.controller.domain.job.lifecycle``)."""

    QUEUED = "QUEUED"
    PLACING = "PLACING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    RESTARTING = "RESTARTING"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


TERMINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class ExitReason(StrEnum):
    """Why a job or an attempt ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    KILLED = "killed"
    USER_ERROR = "user_error"
    RANK_LOST = "rank_lost"
    NODE_LOST = "node_lost"
    LAUNCH_FAILED = "launch_failed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    RESTARTS_EXHAUSTED = "restarts_exhausted"
    PREEMPTED = "preempted"
    NODE_DRAINED = "node_drained"
    RESIZED = "resized"
    HANG = "hang"
    NON_FINITE_LOSS = "nan"
    OUT_OF_MEMORY = "out_of_memory"
    INFEASIBLE = "infeasible"


class FailureClass(StrEnum):
    """What kind of trouble a diagnosis finds; ``NONE`` where the ranks make progress."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    FROZEN = "frozen"
    GIL_HELD = "gil_held"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    DATA_STALL = "data_stall"
    NAN = "nan"
    NODE_LOST = "node_lost"
    NETWORK = "network"
    KILLED_BY_OPERATOR = "killed_by_operator"
    USER_ERROR = "user_error"
    HANG = "hang"
    LAUNCH_FAILED = "launch_failed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    NONE = "none"


class RankPhase(IntEnum):
    """What a rank is doing now. The four words of the engine's ``TrainingState`` are among them."""

    SPAWNED = 0
    INIT = 1
    RENDEZVOUS = 2
    BUILD = 3
    LOAD = 4
    DATA = 5
    IDLE = 6
    FORWARD = 7
    PRE_BACKWARD = 8
    POST_BACKWARD = 9
    OPTIMIZER = 10
    EVAL = 11
    CHECKPOINT = 12
    FINISHED = 13
    FAILED = 14
    SCRIPT = 15
    TRACE = 16


class CheckpointState(StrEnum):
    """The state of a checkpoint; jobs resume only from COMMITTED ones."""

    WRITING = "WRITING"
    SEALED = "SEALED"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    CORRUPT = "CORRUPT"
    DELETING = "DELETING"


class TraceState(StrEnum):
    """The state of a trace: requested; its ranks record; all files written; or failed."""

    REQUESTED = "REQUESTED"
    RECORDING = "RECORDING"
    DONE = "DONE"
    FAILED = "FAILED"


class PlanState(StrEnum):
    """The state of a plan: its model is profiled; it is ready (feasible or not); or it failed."""

    PROBING = "PROBING"
    READY = "READY"
    FAILED = "FAILED"


class NodeState(StrEnum):
    """The state of a node: whether its lease is renewed."""

    READY = "READY"
    DRAINING = "DRAINING"
    LOST = "LOST"


class PoolKind(StrEnum):
    """What brings the nodes of a pool."""

    SLURM = "slurm"
    RAY = "ray"
    KUBERNETES = "kubernetes"


class ReservationState(StrEnum):
    """What is wanted of nodes of a pool, and how far that is.

    REQUESTED: the pool is to be asked. PROVISIONING: it was asked; not all nodes have joined. READY: all
    have. RELEASING: they are to be given back. RELEASED: they were. LOST: so were they, after the pool had
    taken them back, or one of them was lost.
    """

    REQUESTED = "REQUESTED"
    PROVISIONING = "PROVISIONING"
    READY = "READY"
    RELEASING = "RELEASING"
    RELEASED = "RELEASED"
    LOST = "LOST"

    @property
    def is_over(self) -> bool:
        """Whether its nodes are gone."""
        return self in {ReservationState.RELEASED, ReservationState.LOST}
