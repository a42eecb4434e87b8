"""What every pool promises, on those that can run on this machine."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Protocol

import psutil
import pytest
from tenacity import RetryError

from services.contract.messages.facts import GangEnded, NodeJoined
from services.contract.words.ids import NodeId
from services.controller.domain.scheduling.reservations import Sighting
from services.controller.ports.pools import (
    AgentProcess,
    NodePool,
    PoolError,
    PoolRefusedError,
)
from tests.agent.conftest import NODE, PROGRAMS, Controller, is_gone, running
from tests.parts import ROOT, gone
from tests.pools import kube_cluster, ray_cluster, slurm_cluster
from tests.pools.kube_world import ControlledKubeWorld, KubeWorld
from tests.pools.ray_world import RayWorld
from tests.pools.slurm_world import SlurmWorld
from tests.waiting import until

PLANE = "control-plane"
WORLDS: dict[str, tuple[ModuleType, Callable[..., SlurmWorld | RayWorld | KubeWorld]]] = {
    "slurm": (slurm_cluster, SlurmWorld),
    "ray": (ray_cluster, RayWorld),
    "kubernetes": (kube_cluster, KubeWorld),
    PLANE: (kube_cluster, ControlledKubeWorld),
}
STAND_IN = Path(__file__).parent / "agent_process.py"
QUOTED = 'it\'s $word\n`and` "has" all'


class World(Protocol):
    """A scheduler with four nodes, pools that ask it, and what can befall its nodes.

    Attributes:
        busy: Why a reservation waits for nodes that others have, in the scheduler's words.
        impossible: Why one waits that is larger than the scheduler; any of these.
        refusal: What is said of a kind of node that there is not; None: it waits, as what is impossible.
        ended: What is said of a reservation of which an agent ended.
        ends_by_itself: Whether the other agents end then, before the reservation is released.
        foreign: Begins the scheduler's own variables, which agents do not see.
    """

    @property
    def busy(self) -> str: ...
    @property
    def impossible(self) -> frozenset[str]: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def ended(self) -> str: ...
    @property
    def ends_by_itself(self) -> bool: ...
    @property
    def foreign(self) -> str: ...

    @property
    def marks(self) -> Mapping[str, str]:
        """Variables by which processes of agents are found."""
        ...

    def pool(self, *, grace_s: float = 20, unknown_kind: bool = False) -> NodePool:
        """A pool as a controller that has just started opens it; of nodes that are not there."""
        ...

    def close_pools(self) -> None:
        """Let go of all that ``pool`` has given."""
        ...

    def requests(self, reservation_id: str) -> int:
        """How often the scheduler was asked for a reservation."""
        ...

    def processes(self) -> Sequence[psutil.Process]:
        """All live processes of reservations, the scheduler's own for them included."""
        ...

    def kill_node_of(self, process: psutil.Process) -> None: ...
    def freeze_node_of(self, process: psutil.Process) -> None: ...
    def repair_nodes(self) -> None: ...
    def silent(self) -> AbstractContextManager[None]: ...

    def imitated(self, reservation_id: str) -> AbstractContextManager[None]:
        """Within, another user has what is described as a reservation of node 1, and cannot be released as one."""
        ...


class Reserved:
    """A reservation and its agents, as a controller's rounds see them."""

    def __init__(
        self, world: World, reservation_id: str, count: int, folder: Path, grace_s: float = 20
    ) -> None:
        self.world = world
        self.pool = world.pool(grace_s=grace_s)
        self.id = reservation_id
        self.folder = folder
        self.node_ids = self.pool.limits.node_ids[:count]
        folder.mkdir(exist_ok=True)

    def agents(self, *more: str) -> Mapping[NodeId, AgentProcess]:
        return {
            name: AgentProcess(
                (sys.executable, str(STAND_IN), str(self.folder / name), *more),
                {**self.world.marks, "MESHLOOM_NODE_ID": name, "OUR_WORD": QUOTED},
            )
            for name in self.node_ids
        }

    def provision(self, *more: str) -> "Reserved":
        asyncio.run(self.pool.provision(self.id, self.agents(*more)))
        return self

    def sighting(self, pool: NodePool | None = None) -> Sighting | None:
        told = asyncio.run((pool or self.pool).sightings())
        return next((each for each in told if each.id == self.id), None)

    def joined(self) -> dict[NodeId, psutil.Process]:
        """The agents once all run."""

        def look() -> dict[NodeId, psutil.Process] | None:
            files = {name: self.folder / f"{name}.agent" for name in self.node_ids}
            if not all(
                file.exists() and file.read_text().endswith("\n") for file in files.values()
            ):
                return None
            return {name: psutil.Process(int(file.read_text())) for name, file in files.items()}

        return until(look)

    def is_seen_gone(self) -> bool:
        sighting = self.sighting()
        return sighting is None or not sighting.is_held or not sighting.is_whole

    def is_given_back(self) -> bool:
        sighting = self.sighting()
        return sighting is None or not sighting.is_held

    def told(self) -> set[NodeId]:
        return {name for name in self.node_ids if (self.folder / f"{name}.told").exists()}

    def release(self, pool: NodePool | None = None) -> None:
        """Ask for the end until it is seen, as rounds do."""

        def look() -> bool:
            if self.is_given_back():
                return True
            asyncio.run((pool or self.pool).release(self.id))
            return False

        until(look, every_s=0.2)


class FencedNode:
    """A node whose agent is real, with this test as its controller.

    Args:
        world: Brings it.
        redis_url: Of its agents.
    """

    def __init__(self, world: World, redis_url: str) -> None:
        self._world = world
        self._redis_url = redis_url

    def launch(self, reservation_id: str, folder: Path, *program: str) -> Reserved:
        """Ask for it in a reservation of this name; ``program`` runs its agent."""
        reserved = Reserved(self._world, reservation_id, 1, folder)
        command = (*program, sys.executable, "-m", "services.worker.agent")
        environment = {
            **self._world.marks,
            "MESHLOOM_REDIS_URL": self._redis_url,
            "MESHLOOM_HOME": str(folder / "home"),
            "MESHLOOM_NODE_ID": NODE,
            "MESHLOOM_USER_PATH": str(PROGRAMS),
            "MESHLOOM_TRAINER": "rank_program:train",
            "MESHLOOM_ADDRESS": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
        }
        agents = {reserved.node_ids[0]: AgentProcess(command, environment)}
        asyncio.run(reserved.pool.provision(reserved.id, agents))
        return reserved


def is_well(reserved: Reserved) -> bool:
    sighting = until(reserved.sighting)
    return (sighting.is_held, sighting.is_whole, sighting.reason) == (True, True, "")


def nothing_is_left(world: World) -> None:
    """Wait until no process of any reservation lives."""
    try:
        until(lambda: not world.processes())
    except RetryError:
        left = [(process.pid, process.cmdline()) for process in world.processes()]
        pytest.fail(f"still there: {left}")


@pytest.fixture(
    scope="module",
    params=["slurm", "ray", "kubernetes", pytest.param(PLANE, marks=pytest.mark.kubernetes)],
)
def shared_world(request: pytest.FixtureRequest) -> Iterator[World]:
    cluster, make = WORLDS[request.param]
    reason = cluster.why_not_here()
    if reason is not None:
        pytest.skip(reason)
    given = (request.getfixturevalue("kube_programs"),) if request.param == PLANE else ()
    with make(*given) as world:
        yield world


@pytest.fixture
def world(shared_world: World) -> Iterator[World]:
    yield shared_world
    shared_world.close_pools()
    nothing_is_left(shared_world)


def test_agents_start_on_all_nodes_and_end_when_told_before_any_rank_is_signalled(
    world: World, tmp_path: Path
) -> None:
    reserved = Reserved(world, "whole-life", 3, tmp_path).provision()
    agents = reserved.joined()
    assert len({process.pid for process in agents.values()}) == 3
    assert all(process.environ()["OUR_WORD"] == QUOTED for process in agents.values())
    assert all(process.environ()["MESHLOOM_NODE_ID"] == name for name, process in agents.items())
    assert not [
        name for name in agents[reserved.node_ids[0]].environ() if name.startswith(world.foreign)
    ]
    # A scheduler may say a moment later than an agent that it has begun.
    wanted = Sighting("whole-life", reserved.node_ids, is_held=True, reason="")
    until(lambda: reserved.sighting() == wanted)
    assert not any("$word" in " ".join(process.cmdline()) for process in world.processes())

    reserved.release()
    nothing_is_left(world)
    assert reserved.told() == set(reserved.node_ids)
    assert not list(tmp_path.glob("*.signalled"))
    asyncio.run(reserved.pool.release(reserved.id))
    asyncio.run(reserved.pool.release("never-made"))


def test_repeated_and_simultaneous_requests_make_one_reservation(
    world: World, tmp_path: Path
) -> None:
    first = Reserved(world, "asked-often", 1, tmp_path)

    async def twice() -> None:
        pools = (world.pool(), world.pool())
        await asyncio.gather(*(pool.provision(first.id, first.agents()) for pool in pools))
        await pools[0].provision(first.id, first.agents())

    asyncio.run(twice())
    first.joined()
    assert world.requests(first.id) == 1
    first.release()
    first.provision()  # of a controller that does not know yet that it was given back
    assert first.is_seen_gone()
    nothing_is_left(world)


def test_all_nodes_or_none_and_a_restarted_controller_finds_both_states(
    world: World, tmp_path: Path
) -> None:
    small = Reserved(world, "has-two", 2, tmp_path / "small").provision()
    small.joined()
    large = Reserved(world, "wants-three", 3, tmp_path / "large").provision()

    def waits() -> Sighting | None:
        sighting = large.sighting(world.pool())
        return sighting if sighting is not None and sighting.reason == world.busy else None

    assert until(waits) == Sighting("wants-three", large.node_ids, is_held=True, reason=world.busy)
    assert not list(large.folder.iterdir())
    has_two = Sighting("has-two", small.node_ids, is_held=True, reason="")
    until(lambda: small.sighting(world.pool()) == has_two)

    small.release(world.pool())  # by a controller that knows nothing
    large.joined()
    wanted = Sighting("wants-three", large.node_ids, is_held=True, reason="")
    until(lambda: large.sighting(world.pool()) == wanted)
    large.release(world.pool())
    nothing_is_left(world)


def test_what_waits_is_given_back_at_once(world: World, tmp_path: Path) -> None:
    reserved = Reserved(world, "too-many", 9, tmp_path).provision()
    sighting = until(reserved.sighting)
    assert sighting.is_held
    until(lambda: until(reserved.sighting).reason in world.impossible)
    reserved.release()


def test_what_another_user_made_like_a_reservation_is_passed_over(
    world: World, tmp_path: Path
) -> None:
    """Taken for one it would be kept, with its nodes, until it was released, and no release would end it."""
    reserved = Reserved(world, "imitated", 1, tmp_path)
    with world.imitated(reserved.id):
        assert reserved.sighting() is None
        asyncio.run(reserved.pool.release(reserved.id))


def test_what_can_never_be_is_told_in_the_schedulers_words(world: World, tmp_path: Path) -> None:
    reserved = Reserved(world, "never", 1, tmp_path)
    reserved.pool = world.pool(unknown_kind=True)
    if world.refusal is None:
        reserved.provision()
        # A node of that kind may come yet.
        until(lambda: until(reserved.sighting).reason in world.impossible | {world.busy})
        reserved.release()
        return
    with pytest.raises(PoolRefusedError, match=world.refusal):
        reserved.provision()
    assert reserved.sighting() is None


def test_an_agents_end_ends_the_others(world: World, tmp_path: Path) -> None:
    reserved = Reserved(world, "loses-an-agent", 2, tmp_path).provision()
    agents = reserved.joined()
    agents[reserved.node_ids[1]].kill()
    until(reserved.is_seen_gone)
    until(lambda: world.ended in until(reserved.sighting).reason)
    if not world.ends_by_itself:
        reserved.release()
    until(lambda: gone(list(agents.values())))
    nothing_is_left(world)


def test_a_lost_or_frozen_node_ends_the_others_of_its_reservation(
    world: World, tmp_path: Path
) -> None:
    lost = Reserved(world, "loses-a-node", 2, tmp_path / "lost").provision()
    frozen = Reserved(world, "has-a-frozen-node", 2, tmp_path / "frozen").provision()
    agents = lost.joined()
    world.kill_node_of(agents[lost.node_ids[1]])
    frozen_agents = frozen.joined()
    still = frozen_agents[frozen.node_ids[1]]
    world.freeze_node_of(still)
    for each in (lost, frozen):
        until(each.is_seen_gone, timeout_s=90)
        if not world.ends_by_itself:
            each.release()
    until(lambda: gone([*agents.values(), frozen_agents[frozen.node_ids[0]]]))
    assert not gone([still])
    world.repair_nodes()
    nothing_is_left(world)


def test_agents_that_do_not_end_in_their_grace_are_killed(world: World, tmp_path: Path) -> None:
    reserved = Reserved(world, "is-stubborn", 2, tmp_path, grace_s=3)
    agents = reserved.provision("stubborn").joined()
    reserved.release()
    until(lambda: gone(list(agents.values())))
    assert reserved.told() == set(reserved.node_ids)
    nothing_is_left(world)


def test_of_a_node_that_is_launched_twice_the_first_agent_trains_on_and_the_second_one_ends(
    world: World, tmp_path: Path, redis_url: str
) -> None:
    """As by a controller that lost its record, or by a scheduler that queued a batch job again."""
    node, controller = FencedNode(world, redis_url), Controller(redis_url)
    controller.open_job()
    first = node.launch("comes-first", tmp_path / "first")
    controller.fact(NodeJoined)
    ranks = running(controller).pids.values()

    said, code = tmp_path / "said", tmp_path / "code"
    noting = f'"$0" "$@" 2>{said}; code=$?; echo $code >{code}; exit $code'
    second = node.launch("comes-second", tmp_path / "second", "sh", "-c", noting)
    until(second.is_seen_gone)
    second.release()
    until(lambda: code.exists() and code.read_text() == "3\n")
    assert "in use by another agent" in said.read_text()
    step = controller.steps()[-1].step
    until(lambda: controller.steps()[-1].step > step)
    assert not any(map(is_gone, ranks))
    assert len(controller.all_of(NodeJoined)) == 1
    assert not controller.all_of(GangEnded)
    until(lambda: is_well(first))

    first.release()
    until(lambda: all(map(is_gone, ranks)))
    nothing_is_left(world)
    controller.client.close()


def test_a_rank_that_is_killed_costs_its_gang_and_no_node(
    world: World, tmp_path: Path, redis_url: str
) -> None:
    node, controller = FencedNode(world, redis_url), Controller(redis_url)
    controller.open_job()
    reserved = node.launch("loses-a-rank", tmp_path / "agent")
    controller.fact(NodeJoined)
    ranks = running(controller).pids
    os.kill(ranks[1], signal.SIGKILL)
    (end,) = until(lambda: controller.all_of(GangEnded))
    assert {each.rank: each.signal for each in end.exits}[1] == signal.SIGKILL
    assert all(map(is_gone, ranks.values()))
    until(lambda: is_well(reserved))
    reserved.release()
    nothing_is_left(world)
    controller.client.close()


def test_a_scheduler_that_does_not_answer_is_no_refusal(world: World, tmp_path: Path) -> None:
    reserved = Reserved(world, "survives-the-scheduler", 1, tmp_path).provision()
    agents = reserved.joined()
    with world.silent():
        with pytest.raises(PoolError) as caught:
            reserved.provision()
        assert not isinstance(caught.value, PoolRefusedError)
    assert not gone(list(agents.values()))
    assert until(reserved.sighting).is_held
    reserved.release()
    nothing_is_left(world)
