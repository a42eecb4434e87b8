"""What forks ranks may be stopped by anybody, and hands no job's secrets to another job's ranks."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import pytest
from pydantic import JsonValue

from fsdp_core.plan.model import MeshPlan, ShardingPlan
from services.contract.jobs.entry_points import entry_points
from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang, ReturnReplica, SetReplicas
from services.contract.messages.facts import (
    Fact,
    GangEnded,
    GangLaunched,
    LaunchRefused,
    ReplicaLost,
    ReplicaReady,
)
from services.contract.messages.rank_pipe import RankSeat, ReplicaSet
from services.contract.messages.warm_channel import NODE_MARK, RankForked, RankReaped
from services.contract.system.durable import node_condition
from services.local.settings import child_environment
from services.worker.agent.host.folders import AttemptFolder, NodeFolder
from services.worker.agent.host.network import Network
from services.worker.agent.node_commands import NodeCommands
from services.worker.agent.ranks import template_link, warm_keeper
from services.worker.agent.ranks.admission import Admission
from services.worker.agent.ranks.code_cache import CodeCache
from services.worker.agent.ranks.launch import Crew, Launcher, LaunchError
from services.worker.agent.ranks.template_link import Imported
from services.worker.agent.ranks.warm_keeper import WarmKeeper
from services.worker.agent.ranks.warm_link import ForkRefusedError
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.supervisor import Supervisor
from tests.agent.conftest import FOREVER, JOB, NODE, PROGRAMS, is_gone, launch
from tests.agent.test_forked_for_nothing import NoNodeCommands
from tests.disk import Disk, small_disk
from tests.waiting import until


class NoCode:
    """No job here brings code."""


@dataclass
class Forkers:
    """A template and a warm process in the agent's place, and what they told."""

    keeper: WarmKeeper
    launcher: Launcher
    folder: NodeFolder
    told: list[RankForked | RankReaped] = field(default_factory=list)
    ends: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def launch(self, fence: int, **options: JsonValue) -> Crew:
        command = launch(fence, 1, FOREVER, **{"pause_s": 0.01, **options})
        crew = await self.launcher.launch(command, self.folder.attempt(command.job_id, fence))
        for pipe in crew.pipes.values():
            pipe.close()
        for board in crew.boards.values():
            board.close()
        return crew

    async def warm(self) -> psutil.Process:
        return psutil.Process((await self.keeper.ready()).pid)


@asynccontextmanager
async def forkers(folder: Path) -> AsyncIterator[Forkers]:
    node = NodeFolder(folder, NODE, folder)
    node.path.mkdir(parents=True)
    mark = f"{node.mark}/life"
    imported = Imported(
        child_environment(PYTHONPATH=str(Path(__file__).parents[2])) | {NODE_MARK: mark},
        "rank_program:train",
        (PROGRAMS,),
        0.0,
    )
    keeper = WarmKeeper(imported, mark, node)
    admission = Admission(entry_points(None, otherwise_any=True), folder, ())
    codes = cast("CodeCache", NoCode())
    launcher = Launcher(
        NODE, Network("127.0.0.1", "lo"), folder / "checkpoints", keeper, admission, codes
    )
    made = Forkers(keeper, launcher, node)
    running = asyncio.create_task(keeper.run(made.told.append, made.ends.put_nowait))
    try:
        await keeper.ready()
        yield made
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize("stopped", ["warm process", "template"])
def test_a_stopped_process_that_is_to_fork_is_killed_and_the_next_launch_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    monkeypatch.setattr(template_link, "FORKS_WITHIN_LOOKS", 20)
    monkeypatch.setattr(template_link, "_LOOK_EVERY_S", 0.1)

    async def run() -> None:
        async with forkers(tmp_path) as made:
            warm = await made.warm()
            template = warm.parent()
            assert template is not None
            if stopped == "warm process":
                warm.suspend()
                words = rf"warm process \(pid {warm.pid}\) did not answer within 2 s \(it was st"
                with pytest.raises(LaunchError, match=words):
                    await made.launch(1)
            else:
                template.suspend()
                warm.kill()
                await made.ends.get()
            crew = await made.launch(2)
            assert psutil.Process(crew.pids[0]).ppid() == (await made.warm()).pid
            until(lambda: is_gone(warm.pid))
            if stopped == "template":
                until(lambda: is_gone(template.pid))
            else:
                assert not is_gone(template.pid)

    asyncio.run(run())


def test_a_folder_where_the_template_listens_keeps_no_template_from_starting(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with forkers(tmp_path) as made:
            warm = await made.warm()
            template = warm.parent()
            assert template is not None
            place = made.folder.template_socket
            place.unlink()
            (place / "deep").mkdir(parents=True)
            template.kill()
            warm.kill()
            await made.ends.get()
            assert not is_gone((await made.launch(1)).pids[0])
            assert place.is_socket()

    asyncio.run(run())


def test_a_stopped_warm_process_ends_with_its_ranks_though_nobody_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_keeper, "STOPPED_LOOKS", 3)
    monkeypatch.setattr(warm_keeper, "_LOOK_EVERY_S", 0.05)

    async def run() -> None:
        async with forkers(tmp_path) as made:
            crew = await made.launch(1)
            warm = await made.warm()
            warm.suspend()
            psutil.Process(crew.pids[0]).kill()  # nobody reaps it, nobody tells
            assert str(warm.pid) in await made.ends.get()
            assert is_gone(crew.pids[0])
            assert await made.warm() != warm

    asyncio.run(run())


def test_a_request_that_the_kernel_does_not_send_is_refused_and_the_next_one_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with forkers(tmp_path) as made:
            link = await made.keeper.ready()

            def refuse(*_: object) -> None:
                raise OSError(errno.ETOOMANYREFS, "too many descriptors are in flight")

            with monkeypatch.context() as patched:
                patched.setattr(link._channel, "send", refuse)
                with pytest.raises(ForkRefusedError, match=r"not sent: .* in flight") as refused:
                    await made.launch(1)
                # Any process of the user can take them all: that costs no job a restart.
                told = node_condition(refused.value, NODE)
                assert told is not None
                assert told.startswith(f"processes on {NODE} have sent too many file handles")
            assert not is_gone((await made.launch(2)).pids[0])
            assert await made.keeper.ready() is link

    asyncio.run(run())


@pytest.mark.system
def test_no_rank_begins_with_the_secrets_of_another_job_in_its_memory(tmp_path: Path) -> None:
    value = "".join(sorted("a value that stands nowhere else"))
    (tmp_path / "HUB").write_text(value)

    async def run() -> None:
        async with forkers(tmp_path) as made:
            options: dict[str, JsonValue] = {"credential": {"secret": "HUB"}}
            rank = (await made.launch(1, **options)).pids[0]
            until(lambda: value.encode() in memory_of(rank))
            assert value.encode() not in memory_of((await made.warm()).pid)
            assert value.encode() not in memory_of((await made.launch(2)).pids[0])

    asyncio.run(run())


class SlowToReturn:
    """Starts ranks of a lost replica, and is done with that once their gang has been reported."""

    def __init__(self, launcher: Launcher) -> None:
        self.launch = launcher.launch
        self.give_code_back = launcher.give_code_back
        self._launcher = launcher
        self.forked: Crew | None = None
        self.reported = asyncio.Event()

    async def launch_again(self, lost: Mapping[int, RankSeat], folder: AttemptFolder) -> Crew:
        endless = {"spec": two_replicas(FOREVER).spec}
        seats = {rank: seat.model_copy(update=endless) for rank, seat in lost.items()}
        self.forked = await self._launcher.launch_again(seats, folder)
        await self.reported.wait()
        return self.forked


def test_a_replica_that_returns_when_the_others_have_finished_leaves_no_ranks_behind(
    tmp_path: Path,
) -> None:
    """A replica that dies at the end of its job is asked back while the others leave."""
    told: list[Fact] = []

    async def seen(kind: type[Fact], count: int = 1) -> list[Fact]:
        while len(found := [fact for fact in told if isinstance(fact, kind)]) < count:  # noqa: ASYNC110 a list tells nobody
            await asyncio.sleep(0.01)
        return found

    async def run() -> None:
        async with forkers(tmp_path) as made, asyncio.timeout(60):
            launcher = SlowToReturn(made.launcher)
            supervisor = Supervisor(
                NODE,
                made.folder,
                Storage(tmp_path / "checkpoints", NODE),
                cast("NodeCommands", NoNodeCommands()),
                cast("Launcher", launcher),
                told.append,
            )

            async def beat() -> None:
                while True:
                    while made.told:
                        supervisor.rank_told(made.told.pop(0))
                    supervisor.take_records()
                    supervisor.records_written()
                    await asyncio.sleep(0.01)

            tasks = [
                asyncio.create_task(supervisor.run(lambda: False)),
                asyncio.create_task(beat()),
            ]
            await supervisor.handle(two_replicas(steps=60))
            await seen(ReplicaReady, 2)
            both = ReplicaSet(epoch=1, members=(0, 1), host="127.0.0.1", port=1)
            await supervisor.handle(SetReplicas(job_id=JOB, fence=1, replicas=both))
            (launched,) = await seen(GangLaunched)
            assert isinstance(launched, GangLaunched)
            os.kill(launched.pids[1], signal.SIGKILL)
            await seen(ReplicaLost)
            back = ReturnReplica(job_id=JOB, fence=1, replica=1, life=2)
            returning = asyncio.create_task(supervisor.handle(back))
            await seen(GangEnded)
            launcher.reported.set()
            await returning
            assert launcher.forked is not None
            pid = launcher.forked.pids[1]
            while not is_gone(pid):  # noqa: ASYNC110 nor does a process
                await asyncio.sleep(0.01)
            await supervisor.emptied()
            assert not made.folder.attempt(JOB, 1).boards.exists()
            assert isinstance(told[-1], GangEnded)
            for task in tasks:
                task.cancel()

    asyncio.run(run())


def two_replicas(steps: int) -> LaunchGang:
    command = launch(1, 2, steps, pause_s=0.01)
    asked = {"faults": {"on_replica_loss": "continue"}, "mesh": {"dp_replicate": 2}}
    sharding = ShardingPlan(mesh=MeshPlan(dp_replicate=2))
    return command.model_copy(
        update={
            "spec": JobSpec.model_validate(command.spec.model_dump() | asked),
            "plan": command.plan.model_copy(update={"sharding": sharding}),
        }
    )


def memory_of(pid: int) -> bytes:
    """All of its private memory that can be written."""
    found = b""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights == "rw-p":
                start, end = (int(place, 16) for place in span.split("-"))
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    found += memory.read(end - start)
    return found


def test_a_launch_for_whose_boards_others_left_no_room_is_refused_for_that_and_then_tried_again(
    tmp_path: Path,
) -> None:
    async def run(shared: Disk) -> None:
        async with forkers(tmp_path) as made:
            told: list[Fact] = []
            node = NodeFolder(tmp_path, NODE, shared.path)
            storage = Storage(tmp_path / "checkpoints", NODE)
            node_commands = cast("NodeCommands", NoNodeCommands())
            supervisor = Supervisor(NODE, node, storage, node_commands, made.launcher, told.append)
            shared.fill()
            await supervisor.handle(launch(1, ranks=1))
            shared.free()
            await supervisor.handle(launch(2, ranks=1))
            refused, launched = told
            assert isinstance(refused, LaunchRefused)
            words = f"the shared memory, which has the boards, of {NODE} is full"
            assert refused.condition == words
            assert isinstance(launched, GangLaunched)
            assert [path.name for path in node.attempt(JOB, 1).boards.parent.iterdir()] == [
                f"{JOB}-2"
            ]
            supervisor.condemn_all("the test is over")

    with small_disk(tmp_path / "shm") as shared:
        asyncio.run(run(shared))
