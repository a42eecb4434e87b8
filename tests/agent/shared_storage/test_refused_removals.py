"""Deletions of checkpoints that the storage refuses are tried again by the agent, also once the job has ended."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.traces import traces_folder
from services.contract.messages.commands import PurgeJob, RemoveTraces, RetireCheckpoint
from services.contract.messages.facts import CheckpointLinked, CheckpointRetired, Fact, JobPurged
from services.contract.storage.manifests import Manifest
from services.contract.words.ids import new_job_id
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.removal import remove_tree
from services.worker.agent.host.reserve import THREADS
from services.worker.agent.node_commands import NodeCommands
from services.worker.agent.storage import shared_files
from services.worker.agent.storage.job_storage import purge
from services.worker.agent.supervisor import Supervisor
from tests.agent.conftest import JOB, NODE, launch
from tests.agent.shared_storage.places import Place, commit
from tests.s3_server import Fault

AGAIN_S = 0.01
TRACE = f"trace_{JOB.removeprefix('job_')}"


@pytest.fixture
def told() -> asyncio.Queue[Fact]:
    return asyncio.Queue()


@pytest.fixture
def old(bucket: Place) -> Manifest:
    """The older of two commits."""
    bucket.on(NODE).open_attempt(launch(1))
    old, new = bucket.save(NODE, 1), bucket.save(NODE, 2)
    for manifest in (old, new):
        bucket.on(NODE).commit(commit(manifest))
    return old


@pytest.fixture
def node(bucket: Place) -> NodeCommands:
    nothing: Any = None
    return NodeCommands(NODE, bucket.on(NODE), nothing, nothing, nothing, nothing)


@pytest.fixture
def supervisor(
    bucket: Place, tmp_path: Path, node: NodeCommands, told: asyncio.Queue[Fact]
) -> Supervisor:
    nothing: Any = None
    folder = NodeFolder(tmp_path / "home", NODE, tmp_path)
    return Supervisor(NODE, folder, bucket.on(NODE), node, nothing, told.put_nowait)


def removal(old: Manifest) -> RetireCheckpoint:
    return RetireCheckpoint(job_id=JOB, fence=1, checkpoint_id=old.checkpoint_id)


async def refused(bucket: Place, supervisor: Supervisor, old: Manifest, fault: Fault) -> None:
    assert bucket.server is not None
    bucket.server.fail(fault)
    await supervisor.handle(removal(old))
    bucket.server.repair()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(methods=("PUT",), within="chain", code="AccessDenied", status=403),
        Fault(methods=("POST",), within="delete", code="AccessDenied", status=403),
        Fault(code="AccessDenied", status=403),
    ],
    ids=["the record", "the shards", "all"],
)
def test_what_the_bucket_refused_to_remove_is_removed_when_it_refuses_no_more(
    bucket: Place, supervisor: Supervisor, told: asyncio.Queue[Fact], old: Manifest, fault: Fault
) -> None:
    async def carry_out() -> None:
        await refused(bucket, supervisor, old, fault)
        assert told.empty()
        retrying = asyncio.create_task(supervisor.retry_removals(AGAIN_S))
        async with asyncio.timeout(30):
            assert isinstance(await told.get(), CheckpointRetired)
        retrying.cancel()

    asyncio.run(carry_out())
    assert bucket.committed("node-2") == [2]
    assert not [name for name in bucket.names() if old.checkpoint_id in name and "shards" in name]


@pytest.mark.parametrize("by", [NODE, "node-2"])
def test_of_a_job_that_was_purged_meanwhile_nothing_comes_back(
    bucket: Place, supervisor: Supervisor, node: NodeCommands, old: Manifest, by: str
) -> None:
    async def carry_out() -> None:
        await refused(bucket, supervisor, old, Fault(code="AccessDenied", status=403))
        assert [*node.refused_removals] == [removal(old)]
        if by == NODE:
            await supervisor.handle(PurgeJob(job_id=JOB, fence=1))
            assert not node.refused_removals
        else:
            done = await asyncio.to_thread(purge, bucket.on(by), PurgeJob(job_id=JOB, fence=1), by)
            assert done == JobPurged(job_id=JOB, fence=1, node_id=by)
        assert await node.remove_again(removal(old)) == ()
        assert not node.refused_removals

    asyncio.run(carry_out())
    assert bucket.names() == set()


def test_where_the_storage_is_not_mounted_for_a_while_no_removal_is_forgotten(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path / "storage", None, "")
    storage = place.on(NODE)
    storage.files.identity()
    storage.open_attempt(launch(1))
    old, new = place.save(NODE, 1), place.save(NODE, 2)
    for manifest in (old, new):
        storage.commit(commit(manifest))
    nothing: Any = None
    node = NodeCommands(NODE, storage, nothing, nothing, nothing, nothing)

    async def carry_out() -> None:
        place.folder.rename(tmp_path / "away")
        place.folder.mkdir()
        assert await node.to(removal(old), lambda: False) == ()
        assert await node.remove_again(*node.refused_removals) == ()
        place.folder.rmdir()
        (tmp_path / "away").rename(place.folder)
        (told,) = await node.remove_again(*node.refused_removals)
        assert isinstance(told, CheckpointRetired)

    asyncio.run(carry_out())


def test_removals_that_take_long_hold_up_no_commit_and_are_told_when_they_end(
    tmp_path: Path, told: asyncio.Queue[Fact], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def take_long(folder: Path) -> None:
        released.wait()
        remove_tree(folder)

    monkeypatch.setattr(shared_files, "remove_tree", take_long)
    place = Place(tmp_path / "storage", None, "")
    storage = place.on(NODE)
    storage.open_attempt(launch(1))
    old, new = place.save(NODE, 1), place.save(NODE, 2)
    storage.commit(commit(old))
    nothing: Any = None
    node = NodeCommands(NODE, storage, nothing, nothing, nothing, nothing)
    folder = NodeFolder(tmp_path / "home", NODE, tmp_path)
    supervisor = Supervisor(NODE, folder, storage, node, nothing, told.put_nowait)
    traces = [
        RemoveTraces(
            job_id=new_job_id(1_700_000_000_000, bytes([n] * 10)), fence=1, trace_ids=(TRACE,)
        )
        for n in range(THREADS)
    ]
    for each in traces:
        (traces_folder(place.folder, each.job_id) / TRACE).mkdir(parents=True)

    async def carry_out() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for each in traces:
                group.create_task(supervisor.handle(each))
            group.create_task(supervisor.handle(removal(old)))
            await supervisor.handle(commit(new))
            assert isinstance(await told.get(), CheckpointLinked)
            assert told.empty()
            released.set()
            assert isinstance(await told.get(), CheckpointRetired)

    try:
        asyncio.run(carry_out())
    finally:
        released.set()
    assert not any((traces_folder(place.folder, each.job_id) / TRACE).exists() for each in traces)


def test_what_a_newer_attempt_asked_for_meanwhile_counts(
    bucket: Place, supervisor: Supervisor, node: NodeCommands, old: Manifest
) -> None:
    async def carry_out() -> None:
        await refused(bucket, supervisor, old, Fault(code="AccessDenied", status=403))
        (earlier,) = node.refused_removals
        bucket.on(NODE).open_attempt(launch(2))
        newer = removal(old).model_copy(update={"fence": 2})
        assert bucket.server is not None
        bucket.server.fail(Fault(code="AccessDenied", status=403))
        await supervisor.handle(newer)
        bucket.server.repair()
        assert await node.remove_again(earlier) == ()
        (told,) = await node.remove_again(*node.refused_removals)
        assert isinstance(told, CheckpointRetired)

    asyncio.run(carry_out())


def test_a_removal_that_breaks_does_not_end_the_agent(
    bucket: Place,
    supervisor: Supervisor,
    told: asyncio.Queue[Fact],
    old: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = iter([ValueError("broken")])
    holds = bucket.on(NODE).files.holds

    def breaks_once(folder: Path) -> bool:
        for error in broken:
            raise error
        return holds(folder)

    async def carry_out() -> None:
        await refused(bucket, supervisor, old, Fault(code="AccessDenied", status=403))
        monkeypatch.setattr(bucket.on(NODE).files, "holds", breaks_once)
        retrying = asyncio.create_task(supervisor.retry_removals(AGAIN_S))
        async with asyncio.timeout(30):
            assert isinstance(await told.get(), CheckpointRetired)
        retrying.cancel()

    asyncio.run(carry_out())
