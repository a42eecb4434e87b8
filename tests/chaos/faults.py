"""The faults that the chaos program injects, and the seeded order in which it does."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from services.contract.api.views import JobView
from tests.chaos.proxy import Mode
from tests.cluster import Cluster
from tests.parts import node_frozen


@dataclass(frozen=True)
class Scene:
    """Where a fault happens: the job as it stood before, and which of its ranks is meant."""

    cluster: Cluster
    job: JobView
    orders: Path
    rank: int

    @property
    def node(self) -> str:
        """The node of the rank."""
        assert self.job.plan is not None
        return next(r.node_id for r in self.job.plan.ranks if r.rank == self.rank)

    def ranks_on_node(self) -> list[psutil.Process]:
        """The processes of all ranks there."""
        assert self.job.plan is not None
        there = [r.rank for r in self.job.plan.ranks if r.node_id == self.node]
        return [self.cluster.rank_pid(self.job.id, r, attempt=self.job.attempt) for r in there]

    @property
    def victim(self) -> psutil.Process:
        """The rank's process."""
        return self.cluster.rank_pid(self.job.id, self.rank, attempt=self.job.attempt)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: In the table.
        ends_attempt: Whether the gang cannot go on; if not, nothing of it may be lost.
        away_s: How long it lasts, from and to, in seconds; the seed says how long.
        happen: Injects it, and heals what can be healed when the block ends.
        leaves_zombies: Whether ranks of the ended attempt live on until it is healed.
    """

    name: str
    ends_attempt: bool
    away_s: tuple[float, float]
    happen: Callable[[Scene], AbstractContextManager[None]]
    leaves_zombies: bool = False


@dataclass(frozen=True)
class Planned:
    """A fault of a seed: how long after the one before, which, on which rank, for how long."""

    after_s: float
    fault: Fault
    rank: int
    away_s: float


def schedule(seed: int, every_s: float, ranks: int) -> Iterator[Planned]:
    """The faults of a seed, without end: each kind once, then each once in another order…"""
    chance = random.Random(seed)  # noqa: S311 it must be repeatable, and need not be secret
    while True:
        for fault in chance.sample(FAULTS, len(FAULTS)):
            yield Planned(
                after_s=every_s * chance.uniform(0.8, 1.2),
                fault=fault,
                rank=chance.randrange(ranks),
                away_s=chance.uniform(*fault.away_s),
            )


@contextmanager
def _rank_killed(scene: Scene) -> Iterator[None]:
    scene.victim.kill()
    yield


@contextmanager
def _rank_frozen(scene: Scene) -> Iterator[None]:
    scene.victim.suspend()
    yield


def _ordered(word: str) -> Callable[[Scene], AbstractContextManager[None]]:
    @contextmanager
    def happen(scene: Scene) -> Iterator[None]:
        draft = scene.orders / "draft"
        draft.write_text(word)
        draft.rename(scene.orders / f"rank-{scene.rank}")
        yield

    return happen


@contextmanager
def _agent_killed(scene: Scene) -> Iterator[None]:
    scene.cluster.nodes[scene.node].kill()
    yield
    scene.cluster.nodes[scene.node].start()


def _node_frozen(scene: Scene) -> AbstractContextManager[None]:
    return node_frozen(scene.cluster.nodes[scene.node])


def _node_cut_off(scene: Scene) -> AbstractContextManager[None]:
    return scene.cluster.links[scene.node].misbehaving(Mode.BLACK_HOLE)


@contextmanager
def _controller_killed(scene: Scene) -> Iterator[None]:
    scene.cluster.controller.kill()
    yield
    scene.cluster.controller.start()


@contextmanager
def _redis_killed(scene: Scene) -> Iterator[None]:
    scene.cluster.redis.kill()
    yield
    scene.cluster.redis.start()


def _every_link(mode: Mode) -> Callable[[Scene], AbstractContextManager[None]]:
    @contextmanager
    def happen(scene: Scene) -> Iterator[None]:
        with ExitStack() as stack:
            for link in scene.cluster.links.values():
                stack.enter_context(link.misbehaving(mode))
            yield

    return happen


FAULTS: Final = (
    Fault("rank killed", ends_attempt=True, away_s=(0, 0), happen=_rank_killed),
    Fault("rank exits", ends_attempt=True, away_s=(0, 0), happen=_ordered("exit")),
    Fault("rank raises", ends_attempt=True, away_s=(0, 0), happen=_ordered("raise")),
    Fault(
        "rank out of memory",
        ends_attempt=True,
        away_s=(0, 0),
        happen=_ordered("run out of memory"),
    ),
    Fault("rank frozen", ends_attempt=True, away_s=(0, 0), happen=_rank_frozen),
    Fault("rank holds the GIL", ends_attempt=True, away_s=(0, 0), happen=_ordered("hold the GIL")),
    Fault("agent killed", ends_attempt=True, away_s=(0, 2), happen=_agent_killed),
    Fault(
        "node frozen",
        ends_attempt=True,
        away_s=(12, 20),
        happen=_node_frozen,
        leaves_zombies=True,
    ),
    Fault(
        "node cut off",
        ends_attempt=True,
        away_s=(12, 20),
        happen=_node_cut_off,
        leaves_zombies=True,
    ),
    Fault("controller killed", ends_attempt=False, away_s=(0, 20), happen=_controller_killed),
    Fault("Redis killed", ends_attempt=False, away_s=(0, 10), happen=_redis_killed),
    Fault("Redis cut off", ends_attempt=False, away_s=(0, 10), happen=_every_link(Mode.CUT)),
    Fault("Redis silent", ends_attempt=False, away_s=(0, 10), happen=_every_link(Mode.BLACK_HOLE)),
    Fault("replies lost", ends_attempt=False, away_s=(1, 4), happen=_every_link(Mode.LOSE_REPLIES)),
)
