"""One numbered try of a job: its gang on its nodes, and how it ended."""

from typing import Final

from pydantic import Field

from fsdp_core.plan.model import MeshPlan
from services.contract.messages.base import Address
from services.contract.messages.facts import ExitStanding, RankExit
from services.contract.messages.findings import Findings, in_brief
from services.contract.words.bounds import shortened, within_room
from services.contract.words.ids import CheckpointId, NodeId
from services.contract.words.states import ExitReason, FailureClass
from services.controller.domain.record import Record

ATTEMPTS_KEPT: Final = 20
"""So many of the newest attempts a job's record keeps, beside its first one."""
# A record that Redis does not take can never be written, and its attempt would not end.
_EXITS_BYTES: Final = 4 << 20
_FINDINGS_BYTES: Final = 4 << 20
_BRIEF_CHARACTERS: Final = 256


class Failure(Record):
    """What ended an attempt: the first rank to fail, and its error."""

    rank: int | None = None
    node_id: NodeId | None = None
    phase: str | None = None
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    standing: ExitStanding = ExitStanding.OWN_FAILURE
    error: str | None = None
    error_types: tuple[str, ...] = ()
    traceback: str | None = None


class Diagnosis(Record):
    """What is wrong with an attempt, or what ended it. ``live``: made of running ranks, because somebody asked.

    ``rank`` is the first one in trouble, None where no single rank is.
    """

    verdict: FailureClass
    rank: int | None = None
    node_id: NodeId | None = None
    summary: str
    evidence: tuple[str, ...] = ()
    advice: str
    live: bool = False
    at_ms: int = 0


class NodeFindings(Record):
    """What the agent of a node found when it looked into its ranks."""

    node_id: NodeId
    findings: Findings


class NodeExit(Record):
    """How a rank on a node ended."""

    node_id: NodeId
    exit: RankExit


def _without_traceback(one: NodeExit) -> NodeExit:
    error = None if one.exit.error is None else shortened(one.exit.error, _BRIEF_CHARACTERS)
    brief = {"error": error, "error_types": (), "traceback": None}
    return one.model_copy(update={"exit": one.exit.model_copy(update=brief)})


def _without_stacks(one: NodeFindings) -> NodeFindings:
    ranks = tuple(map(in_brief, one.findings.ranks))
    return one.model_copy(update={"findings": one.findings.model_copy(update={"ranks": ranks})})


class ReplicaBook(Record):
    """The replicas of an attempt that continues without lost ones.

    ``count`` of ``size`` ranks each. ``members`` take part, by the set with number ``epoch``; before all
    had begun it is 0. ``lives``: how often each was launched; ``stores``: where the first rank of those listens that
    have built their models. ``losses``: which was lost when, the newest ones; ``lost`` and ``returned``
    count all. ``breaks``: when connections between members broke without a loss, the newest ones. ``given_up``: why the
    attempt ends all the same.
    """

    count: int
    size: int
    epoch: int = 0
    members: tuple[int, ...] = ()
    lives: dict[int, int] = Field(default_factory=dict)
    stores: dict[int, Address] = Field(default_factory=dict)
    losses: tuple[tuple[int, int], ...] = ()
    lost: int = 0
    returned: int = 0
    breaks: tuple[int, ...] = ()
    given_up: str | None = None

    def has(self, rank: int) -> bool:
        """Whether what becomes of a rank is what becomes of the attempt."""
        return not self.epoch or rank // self.size in self.members


class Attempt(Record):
    """A try. Times in milliseconds of Redis's clock.

    ``incarnations`` names, by node, the life of the agent that got the launch command: in another
    life of that agent no rank of this attempt can be alive. ``store`` is where rank 0 listens,
    ``addresses`` by node those by which its ranks reach each other.
    ``resent``: how often commands were sent again since an agent last answered one.
    ``lost`` says why the first of the ``lost_nodes`` is gone; ``farewell``: because its agent was
    stopped in an orderly way. ``hang`` is what nodes found before they killed ranks that made no
    progress, ``looks`` what they found when somebody asked last; ``oom_kills`` counts the kernel's
    kills for want of memory. ``failed_ms``: when the first rank exited, or a lost node was last
    heard of, where that is known. ``corrupt_source`` is the file by which the checkpoint that it
    was to load proved to be corrupt. ``condition``: what of a node prevents its launch or its last
    checkpoint, and may pass, such as a full disk. ``notices``: what its ranks said of the job that has
    no effect.
    """

    fence: int
    world_size: int
    mesh: MeshPlan | None = None
    incarnations: dict[NodeId, str]
    resumed_from: CheckpointId | None = None
    resumed_step: int = 0
    started_ms: int
    store: Address | None = None
    addresses: dict[NodeId, tuple[str, ...]] = Field(default_factory=dict)
    resent: int = 0
    launched: tuple[NodeId, ...] = ()
    first_step: int | None = None
    first_step_ms: int | None = None
    last_step: int = 0
    ended_nodes: tuple[NodeId, ...] = ()
    exits: tuple[NodeExit, ...] = ()
    refusal: str | None = None
    condition: str | None = None
    corrupt_source: str | None = None
    lost: str | None = None
    lost_nodes: tuple[NodeId, ...] = ()
    farewell: bool = False
    hang: tuple[NodeFindings, ...] = ()
    looks: tuple[NodeFindings, ...] = ()
    oom_kills: int = 0
    diagnosis: Diagnosis | None = None
    failed_ms: int | None = None
    ended_ms: int | None = None
    exit_reason: ExitReason | None = None
    failure: Failure | None = None
    lost_steps: int | None = None
    notices: tuple[str, ...] = ()
    replicas: ReplicaBook | None = None

    @staticmethod
    def exits_kept(exits: tuple[NodeExit, ...]) -> tuple[NodeExit, ...]:
        """Exits as a record takes them: what ranks said that failed first is kept, of the others their errors."""
        in_order = sorted(exits, key=lambda each: (each.exit.standing, each.exit.order))
        kept = within_room(in_order, _EXITS_BYTES, _without_traceback)
        by_place = {(each.node_id, each.exit.rank): each for each in kept}
        return tuple(by_place[each.node_id, each.exit.rank] for each in exits)

    @staticmethod
    def findings_kept(found: tuple[NodeFindings, ...]) -> tuple[NodeFindings, ...]:
        """The same of what nodes found: of those that came later, the innermost frames."""
        return within_room(found, _FINDINGS_BYTES, _without_stacks)

    @property
    def live_nodes(self) -> tuple[NodeId, ...]:
        """The nodes on which ranks of it may live."""
        if self.ended_ms is not None:
            return ()
        gone = {*self.ended_nodes, *self.lost_nodes}
        return tuple(node for node in self.incarnations if node not in gone)

    @property
    def is_over(self) -> bool:
        """No rank lives any more (its outcome may still hang on a commit)."""
        return not self.live_nodes

    @property
    def has_failed(self) -> bool:
        """Whether a part of it is gone, so that the rest can only be ended."""
        return (
            self.lost is not None
            or self.refusal is not None
            or (self.replicas is not None and self.replicas.given_up is not None)
            or any(not (entry.exit.finished or entry.exit.drained) for entry in self.exits)
        )

    def was_prevented(self, failure: Failure | None) -> bool:
        """Whether a state of a node ended it, and ``failure`` is no failure of a rank.

        Ranks that wait for that state to pass are killed when the grace of a stop is over.
        """
        if self.condition is None or self.lost is not None or self.hang:
            return False
        if failure is None or failure.rank is None:
            return True
        return failure.standing == ExitStanding.VICTIM

    def loads(self, checkpoint_id: CheckpointId) -> bool:
        """Whether its ranks may still be reading that checkpoint."""
        is_source = not self.is_over and self.resumed_from == checkpoint_id
        return is_source and self.first_step is None

    @property
    def ranks_that_count(self) -> int:
        """How many ranks have to end well: all, but for those of replicas that were lost."""
        book = self.replicas
        has_lost = book is not None and book.epoch > 0
        return len(book.members) * book.size if book is not None and has_lost else self.world_size

    @property
    def writers(self) -> int:
        """How many ranks write a checkpoint: all, or those of one replica."""
        return self.world_size if self.replicas is None else self.replicas.size

    def has_trained(self, steps: int) -> bool:
        """Whether all ranks finished all ``steps`` of the job."""
        exits = [entry.exit for entry in self.exits]
        if len(exits) < self.ranks_that_count or not all(e.finished for e in exits):
            return False
        return self.last_step >= steps or not any(e.drained for e in exits)

    @property
    def early(self) -> str | None:
        """Why its ranks were done before the job's last step; None: they were not."""
        return next((e.exit.early for e in self.exits if e.exit.finished and e.exit.early), None)

    def has_drained(self) -> bool:
        """Whether all ranks stopped as they were asked."""
        exits = [entry.exit for entry in self.exits]
        is_all = len(exits) == self.ranks_that_count
        return is_all and all(e.finished or e.drained for e in exits)
