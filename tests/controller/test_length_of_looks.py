"""How the work of a look grows with the jobs that run: by what is called, not by a clock."""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import FrameType

import pytest

from services.contract.messages.probing import DeviceType
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling import placement
from services.controller.domain.scheduling.allocation import Allocation, QueueHead
from services.controller.domain.scheduling.node import Lease
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeUsage,
    NotNow,
    usages_of,
)
from services.controller.domain.scheduling.preemption import Occupant
from services.controller.domain.scheduling.queue import schedule
from services.controller.use_cases.reconcile import Reconciler
from tests.controller.histories import NOW, node
from tests.controller.test_queue import on, up_to, waiting
from tests.controller.virtual_cluster import VirtualCluster

pytestmark = pytest.mark.anyio
_TRAIN = {"steps": 100, "global_batch": 120}

_Case = Callable[[int], tuple[list[Job], dict[str, int]]]


def _calls(jobs: list[Job], remaining_ms: dict[str, int], slots: int, nodes: int = 1) -> int:
    """How many functions a look calls."""
    where = [node(slots=slots), *(node(f"n{n}", slots=slots) for n in range(nodes - 1))]
    usages = usages_of(where, jobs, {each.id: Lease(each.incarnation, 5000) for each in where})
    called = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal called
        called += event == "call"

    sys.setprofile(count)
    try:
        found = schedule(jobs, usages, remaining_ms, NOW)
    finally:
        sys.setprofile(None)
    assert found.turns
    return called


def _all_have_to_go(count: int) -> tuple[list[Job], dict[str, int]]:
    where = node(slots=count)
    return [*(on(where, 1) for _ in range(count)), waiting(count, priority=1)], {}


def _those_that_may_be_drained_are_too_few(count: int) -> tuple[list[Job], dict[str, int]]:
    where = node(slots=count)
    weak = [on(where, 1) for _ in range(count - 1)]
    return [*weak, on(where, 1, priority=1), waiting(count, priority=1)], {}


def _all_are_expected_to_end(count: int) -> tuple[list[Job], dict[str, int]]:
    where = node(slots=count)
    jobs = [on(where, 1) for _ in range(count)]
    return [*jobs, waiting(count)], {job.id: 1000 * number for number, job in enumerate(jobs)}


@pytest.mark.parametrize(
    "case", [_all_have_to_go, _those_that_may_be_drained_are_too_few, _all_are_expected_to_end]
)
def test_twice_as_many_jobs_in_the_way_of_a_gang_take_twice_the_work(case: _Case) -> None:
    """With 800 of one rank each a look took six seconds, with 2000 minutes: nobody was placed meanwhile."""
    few, many = (_calls(*case(count), slots=count) for count in (60, 120))
    assert many < 2.5 * few


def test_what_a_job_has_of_a_room_is_found_once_in_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand elastic jobs behind a head each had that of all others found again: ten seconds."""
    where = node(slots=60)
    runs = [
        on(where, 1, resources=up_to(40, 1), train={"steps": 100, "global_batch": 5040 * (2 + n)})
        for n in range(30)
    ]
    found: list[str] = []

    def counted(
        allocation: Allocation,
        job: Job,
        *rest: object,
        real: Callable[..., Occupant] = Allocation._occupant,
    ) -> Occupant:
        found.append(job.id)
        return real(allocation, job, *rest)

    monkeypatch.setattr(Allocation, "_occupant", counted)
    _calls([*runs, waiting(60)], {}, slots=60)
    assert sorted(found) == sorted(job.id for job in runs)


def test_jobs_that_leave_the_same_are_told_the_same_limits_beside_the_first_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 800 elastic jobs each had them worked out for itself: six seconds in each look."""
    where = node(slots=60)
    sizes = [1, 2] * 12
    runs = [
        on(where, n, resources=up_to(40, n), train={"steps": 100, "global_batch": 5040})
        for n in sizes
    ]
    asked: list[QueueHead] = []

    def counted(
        allocation: Allocation,
        device: DeviceType,
        head: QueueHead,
        real: Callable[..., Mapping[str, int]] = Allocation.limits,
    ) -> Mapping[str, int]:
        asked.append(head)
        return real(allocation, device, head)

    monkeypatch.setattr(Allocation, "limits", counted)
    _calls([*runs, waiting(60)], {}, slots=60)
    assert len(asked) == len({*sizes})


def test_of_a_node_on_which_nothing_changed_little_is_asked_for_each_job_that_could_grow() -> None:
    """Sixteen hundred elastic jobs that could grow on a hundred nodes had a look take five to twelve seconds."""
    count = 40
    runs = [on(node(slots=2 * count), 1, resources=up_to(2, 1)) for _ in range(count)]
    too_large = waiting(8400, train={"steps": 100, "global_batch": 8400})
    few, many = (_calls([*runs, too_large], {}, 2 * count, nodes=nodes) for nodes in (2, 22))
    assert many - few < 40 * 20 * count


def test_why_there_are_no_more_slots_for_an_elastic_job_is_not_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is told. It was most of a look of six seconds, in which a thousand were given slots beside the first that waits."""
    asked: list[int] = []

    def counted(
        gang: GangRequest,
        device: DeviceType,
        usages: Sequence[NodeUsage],
        real: Callable[..., NotNow] = placement._why_not_now,
    ) -> NotNow:
        asked.append(gang.ranks)
        return real(gang, device, usages)

    monkeypatch.setattr(placement, "_why_not_now", counted)
    ending = [on(node(slots=10), 1) for _ in range(8)]
    elastic = [on(node("n0", slots=10), 1, resources=up_to(2, 1)) for _ in range(10)]
    # The head waits for the first node, on which nobody may grow until then, and the second is full.
    remaining_ms = {job.id: 1000 for job in ending}
    _calls([*ending, *elastic, waiting(10)], remaining_ms, slots=10, nodes=2)
    assert asked == [10]


async def test_jobs_that_could_grow_at_once_do_so_in_several_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a record to write: nobody was placed while hundreds were."""
    cluster = VirtualCluster({"loom-1": 240})
    gang = await cluster.submit(resources={"ranks": 120}, train={"steps": 9, "global_batch": 120})
    elastic = {
        "resources": {"world": {"min": 1, "max": 2}},
        "train": {"steps": 5_000, "global_batch": 2},
        "checkpoint": {"every_steps": 0},
    }
    grow = [await cluster.submit(**elastic) for _ in range(120)]
    moved = _stops_of_each(monkeypatch, "_grow", cluster, grow)
    await cluster.seconds(70)
    assert (await cluster.job(gang)).is_terminal
    assert {(await cluster.job(job_id)).fence for job_id in grow} == {2}
    assert 0 < max(moved) <= 50


@pytest.mark.parametrize("steps", [100, 40], ids=["long", "over within the grace"])
async def test_a_gang_that_needs_the_slots_of_many_has_them_drained_in_several_looks(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Eight hundred in one look were eight seconds in which a job of still higher priority waited for a free slot.

    The first of them wait again while the last are drained, and are given no slots of which the gang has need: each
    was drained 37 times.
    """
    cluster = VirtualCluster({"loom-1": 120})
    train = {"steps": steps, "global_batch": 12}
    weak = [await cluster.submit(resources={"ranks": 1}, train=train) for _ in range(120)]
    await cluster.seconds(3)
    drained = _stops_of_each(monkeypatch, "_serve_queue", cluster, weak)
    strong = await cluster.submit(resources={"ranks": 120}, train=_TRAIN, priority=1)
    job = await cluster.at_size(strong, 120)
    assert job.fence == 1
    assert 0 < max(drained) <= 50
    assert sum(drained) == 120


def _stops_of_each(
    monkeypatch: pytest.MonkeyPatch, part: str, cluster: VirtualCluster, jobs: list[str]
) -> list[int]:
    """How many of the jobs each run of that part of a look has stop, from now on."""
    real: Callable[..., Awaitable[object]] = getattr(Reconciler, part)
    stops: list[int] = []

    async def counted(*args: object) -> object:
        before = await _stopping(cluster, jobs)
        found = await real(*args)
        stops.append(await _stopping(cluster, jobs) - before)
        return found

    monkeypatch.setattr(Reconciler, part, counted)
    return stops


async def _stopping(cluster: VirtualCluster, jobs: list[str]) -> int:
    return sum([(await cluster.job(job_id)).stop is not None for job_id in jobs])
