"""What agents have of a bucket: copies that they bring, uploads that they repeat, answers that are lost or wrong.

The bucket's server is moto's, in a process of its own.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.traces import trace_file
from services.contract.messages.commands import (
    PurgeJob,
    RemoveTraces,
)
from services.contract.messages.facts import (
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointUnread,
    Fact,
    TraceFailed,
    TraceRecorded,
)
from services.contract.messages.rank_pipe import RankVote
from services.contract.messages.telemetry import StepRecord
from services.contract.storage.bucket import Bucket
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.storage_address import BucketAddress
from services.contract.system.durable import StorageAwayError
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import checkpoint_id, new_trace_id
from services.worker.agent.gangs.trace_files import TraceFiles
from services.worker.agent.gangs.vote_check import VoteCheck
from services.worker.agent.ranks.code_cache import CodeCache
from services.worker.agent.ranks.launch import LaunchError
from services.worker.agent.storage.bucket_files import BucketFiles
from services.worker.agent.storage.job_storage import Storage, purge
from services.worker.agent.storage.journal import Journal
from services.worker.agent.storage.loading import Loading
from services.worker.agent.storage.record_files import records_folder
from services.worker.agent.storage.storage_watch import look, watch_storage
from tests.agent.conftest import JOB, NODE, launch
from tests.agent.shared_storage.places import CONTENT, NODES, PART, SHARD, Place, commit, verify
from tests.parts import ROOT
from tests.s3_server import BUCKET, Fault
from tests.waiting import until

_EMPTY = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def test_a_commit_whose_answer_is_lost_is_one_commit(bucket: Place) -> None:
    assert bucket.server is not None
    bucket.on("node-1").open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    bucket.server.fail(Fault(methods=("PUT",), within="chain", code="", status=500, times=1))
    fact = bucket.on("node-1").commit(commit(manifest))
    assert isinstance(fact, CheckpointLinked)
    assert fact.number == 2
    assert bucket.names() >= {"chain/00000002.json"}
    assert "chain/00000003.json" not in bucket.names()


def test_a_commit_that_nobody_could_read_is_tried_again_and_told_behind_a_later_one(
    bucket: Place,
) -> None:
    assert bucket.server is not None
    node = bucket.on("node-1")
    node.open_attempt(launch(1))
    first, later = bucket.save("node-1", 3), bucket.save("node-1", 6)
    # It reads twice before it links, and nothing is answered from then on.
    methods = ("GET", "HEAD", "PUT")
    bucket.server.fail(Fault(methods=methods, within="chain", code="", status=403, after=2))
    assert isinstance(node.commit(commit(first)), CheckpointLost)
    assert node.found_since(JOB) == ()
    bucket.server.repair()
    assert isinstance(node.commit(commit(later)), CheckpointLinked)
    (found,) = node.found_since(JOB)
    assert (found.manifest, found.number) == (first, 2)
    assert node.found_since(JOB) == ()
    assert bucket.committed("node-1") == [3, 6]


def test_a_listing_that_lacks_what_is_there_costs_no_record(bucket: Place) -> None:
    assert bucket.server is not None
    first, other = bucket.on("node-1"), bucket.on("node-2")
    first.open_attempt(launch(1))
    manifests = [bucket.save("node-1", step) for step in (1, 2, 3)]
    first.commit(commit(manifests[0]))
    bucket.server.fail(Fault(methods=("GET",), within="list-type=2", status=200, says=_EMPTY))
    assert bucket.committed("node-1") == [1]
    assert isinstance(first.commit(commit(manifests[1])), CheckpointLinked)
    other.open_attempt(launch(2))
    assert isinstance(first.commit(commit(manifests[2])), CheckpointLost)  # it is overtaken
    assert bucket.committed("node-2") == [1, 2]
    bucket.server.repair()
    assert [bucket.committed(node) for node in NODES] == [[1, 2], [1, 2]]
    assert [bucket.on(node).chain(JOB).read().fence for node in NODES] == [2, 2]


def test_a_record_that_a_listing_leaves_out_between_others_is_read(bucket: Place) -> None:
    assert bucket.server is not None
    bucket.on("node-1").open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    bucket.on("node-1").commit(commit(manifest))
    bucket.on("node-1").open_attempt(launch(2))
    key = f"{bucket.prefix}/{JOB}/chain/00000003.json"
    listed = (
        f"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>{key}</Key><Size>1</Size>"
        "<ETag>x</ETag></Contents></ListBucketResult>"
    )
    bucket.server.fail(Fault(methods=("GET",), within="list-type=2", status=200, says=listed))
    reading = bucket.on("node-2").chain(JOB).read()
    assert (reading.damaged, reading.fence) == ((), 2)
    assert list(reading.committed.values()) == [manifest]


def test_shards_are_in_use_though_listings_lack_the_record_that_names_them(bucket: Place) -> None:
    assert bucket.server is not None
    bucket.on("node-1").open_attempt(launch(1))
    bucket.on("node-1").commit(commit(bucket.save("node-1", 3)))
    bucket.save("node-1", 6)
    bucket.on("node-1").open_attempt(launch(2))
    bucket.save("node-1", 9, fence=2)
    names = ("opened-0002", "00000001.json")
    keys = "".join(
        f"<Contents><Key>{bucket.prefix}/{JOB}/chain/{name}</Key><Size>1</Size><ETag>x</ETag></Contents>"
        for name in names
    )
    listed = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
    bucket.server.fail(Fault(methods=("GET",), within="%2Fchain%2F", status=200, says=listed))
    of_another = bucket.on("node-2").chain(JOB)
    assert of_another.abandoned() == []
    assert [path.name for path in of_another.uncommitted()] == [checkpoint_id(JOB, 9, 2)]


def test_a_server_that_says_that_all_names_are_taken_is_a_condition(bucket: Place) -> None:
    assert bucket.server is not None
    bucket.on("node-1").open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    taken = Fault(methods=("PUT",), within="chain", code="PreconditionFailed", status=412)
    bucket.server.fail(taken)
    fact = bucket.on("node-1").commit(commit(manifest))
    assert isinstance(fact, CheckpointLost)
    assert "does not show it" in (fact.condition or "")
    bucket.server.repair()
    assert isinstance(bucket.on("node-1").commit(commit(manifest)), CheckpointLinked)


def test_of_a_shard_that_is_far_too_long_little_is_loaded(bucket: Place) -> None:
    bucket.on("node-1").open_attempt(launch(1))
    manifest = bucket.save("node-1", 1)
    bucket.on("node-1").commit(commit(manifest))
    bucket.damage(f"shards/{manifest.checkpoint_id}/{SHARD.name}", bytes(8 << 20))
    other = bucket.on("node-2")
    other.open_attempt(launch(2).model_copy(update={"resume_from": manifest.checkpoint_id}))
    copy = CommitChain(other.root, JOB).shard_folder(manifest.checkpoint_id) / SHARD.name
    assert len(CONTENT) < copy.stat().st_size < 4 << 20
    found = other.verify(verify(manifest))[-1]
    assert isinstance(found, CheckpointCorrupt)
    assert f"not the {len(CONTENT)}" in found.reason


# --- what only a bucket does ------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (403, "AccessDenied")])
def test_a_vote_waits_for_a_bucket_that_refuses_and_goes_on_when_it_answers(
    bucket: Place, status: int, code: str
) -> None:
    assert bucket.server is not None
    server = bucket.server
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    name = checkpoint_id(JOB, 3, 1)
    path = CommitChain(storage.root, JOB).shard_folder(name) / SHARD.name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    server.fail(Fault(methods=("PUT",), within="shards", code=code, status=status))

    async def run() -> tuple[list[str], str | None]:
        waits: list[str] = []
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def on_waits(_rank: int, _vote: RankVote, why: str) -> None:
            if not waits:
                threading.Thread(target=server.repair).start()
            waits.append(why)

        def on_checked(_rank: int, _vote: RankVote, fault: str | None) -> None:
            done.set_result(fault)

        check = VoteCheck(storage.files, JOB, 1, on_checked, on_waits)
        check.check(0, RankVote(checkpoint_id=name, step=3, shard=SHARD))
        async with asyncio.timeout(120):
            fault = await done
        check.end()
        return waits, fault

    waits, fault = asyncio.run(run())
    assert fault is None
    assert f"answers {code} (HTTP {status})" in waits[0]
    assert f"shards/{name}/{SHARD.name}" in bucket.names()


def _grow(path: Path) -> None:
    # It is all holes, and each of its 10 000 parts would take this node's memory.
    os.truncate(path, 1 << 43)


def _change(path: Path) -> None:
    about = path.stat()
    path.write_bytes(bytes(about.st_size))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_grow, f"it has {1 << 43} bytes by now, not {len(CONTENT)}"),
        (_change, "it has changed since it was checked"),
    ],
)
def test_a_shard_that_changes_after_it_was_checked_is_refused_and_not_uploaded(
    bucket: Place, change: Callable[[Path], None], words: str
) -> None:
    assert bucket.server is not None
    server, storage = bucket.server, bucket.on("node-1")
    storage.open_attempt(launch(1))
    name = checkpoint_id(JOB, 3, 1)
    path = CommitChain(storage.root, JOB).shard_folder(name) / SHARD.name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    server.fail(Fault(methods=("PUT", "POST"), within="shards"))

    async def run() -> str | None:
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def on_waits(_rank: int, _vote: RankVote, _why: str) -> None:
            change(path)
            threading.Thread(target=server.repair).start()

        def on_checked(_rank: int, _vote: RankVote, fault: str | None) -> None:
            done.set_result(fault)

        check = VoteCheck(storage.files, JOB, 1, on_checked, on_waits)
        check.check(0, RankVote(checkpoint_id=name, step=3, shard=SHARD))
        async with asyncio.timeout(120):
            fault = await done
        check.end()
        return fault

    fault = asyncio.run(run())
    assert words in str(fault)
    assert not [
        key
        for key in (*server.keys(), *server.unfinished())
        if bucket.prefix in key and name in key
    ]


def test_a_trace_that_grows_before_its_upload_is_not_uploaded(
    bucket: Place, tmp_path: Path
) -> None:
    class Raced(BucketFiles):
        """The rank writes between its agent's look and the upload."""

        def publish(
            self,
            path: Path,
            go_on: Callable[[], None] = lambda: None,
            size: int | None = None,
            sha256: str | None = None,
        ) -> None:
            os.truncate(path, 1 << 43)
            super().publish(path, go_on, size, sha256)

    files = Raced(Bucket(BucketAddress(BUCKET, bucket.prefix), PART), tmp_path / "copies", 1 << 30)
    trace = new_trace_id(1_700_000_000_000, bytes(10))
    path = trace_file(files.root, JOB, trace, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a trace")
    fact = TraceRecorded(
        job_id=JOB, fence=1, node_id=NODE, trace_id=trace, rank=0, path=str(path), bytes=7, first_step=1, last_step=1
    )  # fmt: skip

    async def told() -> Fact:
        facts = asyncio.Queue[Fact]()
        TraceFiles(files, files.root, facts.put_nowait).publish(fact)
        return await facts.get()

    failed = asyncio.run(told())
    assert isinstance(failed, TraceFailed)
    assert f"it has {1 << 43} bytes by now, not 7" in failed.reason


def test_a_link_in_the_place_of_a_copy_leads_an_agent_nowhere_else(bucket: Place) -> None:
    """Ranks of another user own the folder of shards; their agent may write everywhere."""
    bucket.most_copies = 0
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    storage.commit(commit(manifest))
    elsewhere = bucket.folder / "elsewhere"
    elsewhere.mkdir()
    folder = storage.chain(JOB).shard_folder(manifest.checkpoint_id)
    folder.rmdir()
    folder.symlink_to(elsewhere)
    storage.bring("a gang", manifest.checkpoint_id)
    assert list(elsewhere.iterdir()) == []
    assert (folder / SHARD.name).read_bytes() == CONTENT
    (elsewhere / SHARD.name).write_bytes(CONTENT)
    shutil.rmtree(folder)
    folder.symlink_to(elsewhere)
    storage.files.release("a gang")
    bucket.save("node-1", 4)  # there is no room for two copies
    assert (elsewhere / SHARD.name).read_bytes() == CONTENT


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run ranks as another user")
def test_a_copy_that_an_agent_brings_is_its_ranks_user_s(bucket: Place) -> None:
    user = RankUser.named("nobody")
    there = bucket.on("node-1")
    here = Storage(bucket.on("node-2").files, "node-2", user)
    here.open_attempt(launch(1))  # so its ranks' user has the folder of shards
    manifest = bucket.save("node-1", 3)
    there.commit(commit(manifest))
    again = launch(2).model_copy(update={"resume_from": manifest.checkpoint_id})
    here.open_attempt(again)
    folder = here.chain(JOB).shard_folder(manifest.checkpoint_id)
    assert {path.stat().st_uid for path in (folder, folder / SHARD.name)} == {user.uid}


def test_a_commit_that_the_bucket_refuses_is_told_with_the_condition(bucket: Place) -> None:
    assert bucket.server is not None
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    bucket.server.fail(Fault())
    fact = storage.commit(commit(manifest))
    assert isinstance(fact, CheckpointLost)
    assert fact.condition is not None
    assert "answers SlowDown (HTTP 503)" in fact.condition
    told = storage.verify(verify(manifest))
    assert isinstance(told[-1], CheckpointUnread)
    assert storage.files.identity() is None
    assert "answers SlowDown" in str(storage.files.fault())
    bucket.server.repair()
    assert isinstance(storage.commit(commit(manifest)), CheckpointLinked)


def test_an_agent_killed_within_an_upload_leaves_nothing_that_counts(bucket: Place) -> None:
    assert bucket.server is not None
    server, storage = bucket.server, bucket.on("node-1")
    storage.open_attempt(launch(1))
    name = checkpoint_id(JOB, 3, 1)
    path = CommitChain(storage.root, JOB).shard_folder(name) / SHARD.name
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2 * PART))
    server.fail(Fault(methods=("PUT",), within="shards", after=1))
    program = (
        "import sys; from pathlib import Path; from services.contract.storage.bucket import Bucket\n"
        "from services.contract.storage.storage_address import BucketAddress\n"
        "from services.contract.system.durable import StorageAwayError\n"
        f"bucket = Bucket(BucketAddress('{BUCKET}', '{bucket.prefix}'), {PART})\n"
        "while True:\n"
        "    try: bucket.upload(sys.argv[1], Path(sys.argv[2]))\n"
        "    except StorageAwayError: print('waits', flush=True)\n"
    )
    upload = f"{JOB}/shards/{name}/{SHARD.name}"
    with subprocess.Popen(
        [sys.executable, "-c", program, upload, str(path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"waits\n"
        agent.send_signal(signal.SIGKILL)
    server.repair()
    assert [key for key in server.unfinished() if name in key]
    assert bucket.committed("node-2") == []
    bucket.on("node-2").open_attempt(launch(2))
    assert not [key for key in server.unfinished() if name in key]


def test_copies_are_bounded_and_what_is_loaded_stays(bucket: Place) -> None:
    bucket.most_copies = 2 * len(CONTENT)
    bucket.on("node-1").open_attempt(launch(1))
    manifests = [bucket.save("node-1", step) for step in range(1, 6)]
    for manifest in manifests:
        bucket.on("node-1").commit(commit(manifest))
    other = bucket.on("node-2")
    other.bring("a gang", manifests[0].checkpoint_id)
    for manifest in manifests[1:]:
        other.bring("a reader", manifest.checkpoint_id)
        other.files.release("a reader")
    kept = {path.parent.name for path in other.root.rglob(SHARD.name)}
    assert kept == {manifests[0].checkpoint_id, manifests[-1].checkpoint_id}
    assert len(list(bucket.on("node-1").root.rglob(SHARD.name))) == 2
    other.files.forget_copies()
    assert not list(other.root.rglob(SHARD.name))


@pytest.mark.timeout(60)
def test_a_copy_that_takes_long_to_remove_holds_up_nothing_else(
    bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have made it in a hundred thousand pieces; the loop releases what ended gangs had loaded."""
    begun, freed = threading.Event(), threading.Event()
    unlink = os.unlink

    def take_long(path: str, *, dir_fd: int | None = None) -> None:
        begun.set()
        freed.wait()
        unlink(path, dir_fd=dir_fd)

    bucket.most_copies = len(CONTENT)
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    first = bucket.save("node-1", 3)
    storage.commit(commit(first))
    monkeypatch.setattr(os, "unlink", take_long)
    saving = threading.Thread(target=bucket.save, args=("node-1", 4))
    saving.start()
    begun.wait()
    storage.files.release("a gang")
    folder = storage.chain(JOB).shard_folder(first.checkpoint_id)
    assert not (folder / SHARD.name).exists(), "nobody loads what is about to go"
    freed.set()
    saving.join()
    assert list(folder.iterdir()) == []


def test_of_many_copies_that_are_too_much_some_go_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has as many as it likes uploaded, then makes one long: the agent's loop waits for who removes them."""
    monkeypatch.setattr(Bucket, "upload", lambda *_: None)
    files = BucketFiles(Bucket(BucketAddress.parse(f"s3://{BUCKET}/runs")), tmp_path, 1 << 20)

    def publish(number: int, size: int) -> None:
        path = tmp_path / JOB / "shards" / f"ckpt_{number:04d}" / SHARD.name
        path.parent.mkdir(parents=True)
        path.touch()
        os.truncate(path, size)
        files.publish(path)

    def copies() -> list[str]:
        return sorted(path.parent.name for path in tmp_path.rglob(SHARD.name))

    for number in range(600):
        publish(number, 1)
    publish(600, 1 << 40)
    assert copies() == [f"ckpt_{number:04d}" for number in range(256, 601)]
    for number in range(601, 604):
        publish(number, 1)
    assert copies() == ["ckpt_0601", "ckpt_0602", "ckpt_0603"]


def test_a_copy_that_somebody_changed_is_brought_again(bucket: Place) -> None:
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    storage.commit(commit(manifest))
    record = storage.root / JOB / "chain" / "00000002.json"
    record.unlink()
    record.write_bytes(b"{}")
    (record.parent / "00000009.json").write_bytes(b"{}")
    assert bucket.committed("node-1") == [3]
    assert not (record.parent / "00000009.json").exists()


def test_a_file_of_records_reaches_a_node_that_did_not_write_it(bucket: Place) -> None:
    bucket.on("node-1").open_attempt(launch(1))
    own, other = (bucket.on(node).root / JOB / "records" for node in NODES)
    own.mkdir()
    (own / "steps.0001.node-1.a.jsonl").write_bytes(b"\nlonger")
    bucket.on("node-1").files.publish(own / "steps.0001.node-1.a.jsonl")
    bucket.on("node-2").files.pull_missing(other)
    assert (other / "steps.0001.node-1.a.jsonl").read_bytes() == b"\nlonger"
    (own / "steps.0001.node-1.a.jsonl").write_bytes(b"\nlonger than before")
    bucket.on("node-1").files.pull_missing(own)
    assert (own / "steps.0001.node-1.a.jsonl").read_bytes() == b"\nlonger than before"


def test_records_reach_the_bucket_each_time_they_are_written(bucket: Place) -> None:
    """A Redis that is wiped, and a node that is lost with it, cost what came since then."""
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))

    def published(text: str) -> bool:
        files = [name for name in bucket.names() if name.startswith("records/steps")]
        return bool(files) and text in bucket.read(files[0])

    async def write() -> None:
        journal = Journal(storage.files, "node-1.a", every_s=0.02)
        writing = asyncio.create_task(journal.run())
        for step in (1, 2):
            record = StepRecord(step=step, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=1.0)
            journal.take(JOB, 1, {"steps": [record]}, {"steps": f"{step}-0"})
            text = f'"id":"{step}-0"'
            await asyncio.to_thread(until, partial(published, text), timeout_s=25)
        writing.cancel()

    asyncio.run(write())


@pytest.mark.timeout(60)
def test_records_that_a_rank_has_grown_are_not_uploaded_and_keep_no_others(bucket: Place) -> None:
    storage = bucket.on("node-1")
    storage.open_attempt(launch(1))
    record = StepRecord(step=1, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=1.0)
    folder = records_folder(storage.root, JOB)

    async def write() -> None:
        journal = Journal(storage.files, "node-1.a", every_s=3600.0)
        for fence in (1, 2):
            journal.take(JOB, fence, {"steps": [record]}, {"steps": f"{fence}-0"})
        await journal.flush()
        os.truncate(folder / "steps.0001.node-1.a.jsonl", 1 << 40)
        await journal.publish()

    asyncio.run(write())
    names = {name for name in bucket.names() if name.startswith("records/")}
    assert names == {"records/steps.0002.node-1.a.jsonl"}


def test_how_far_a_checkpoint_is_loaded_is_told_and_the_loading_ends_on_demand(
    bucket: Place,
) -> None:
    bucket.on("node-1").open_attempt(launch(1))
    manifest = bucket.save("node-1", 3)
    bucket.on("node-1").commit(commit(manifest))
    other, told = bucket.on("node-2"), list[tuple[int, int]]()
    resumed = launch(2).model_copy(update={"resume_from": manifest.checkpoint_id})
    stopped = Loading(lambda *_: None)
    stopped.stop()
    with pytest.raises(LaunchError, match="stopped while its checkpoint was loaded"):
        other.open_attempt(resumed, stopped)
    assert not list(other.root.rglob("shards/*/*"))
    other.open_attempt(resumed, Loading(lambda *counts: told.append(counts), every_s=0.0))
    assert told[-1] == (len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_trace_is_told_once_it_is_in_the_bucket_and_else_where_its_file_is(
    bucket: Place, *, refuses: bool
) -> None:
    storage = bucket.on("node-1")
    trace = "trace_" + "0" * 26
    path = trace_file(storage.root, JOB, trace, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"what a profiler saw")
    fact = TraceRecorded(
        job_id=JOB,
        fence=1,
        node_id="node-1",
        trace_id=trace,
        rank=0,
        path=str(path),
        bytes=19,
        first_step=1,
        last_step=2,
    )
    assert bucket.server is not None
    if refuses:
        bucket.server.fail(
            Fault(methods=("PUT",), within="/traces/", code="AccessDenied", status=403)
        )

    async def told() -> Fact:
        facts = asyncio.Queue[Fact]()
        TraceFiles(storage.files, storage.root, facts.put_nowait).publish(fact)
        return await facts.get()

    answer = asyncio.run(told())
    name = path.relative_to(storage.root / JOB).as_posix()
    if refuses:
        assert isinstance(answer, TraceFailed)
        assert "AccessDenied" in answer.reason
        assert f"its file stays on node-1: {path}" in answer.reason
    else:
        assert answer == fact.model_copy(
            update={"path": f"s3://{BUCKET}/{bucket.prefix}/{JOB}/{name}"}
        )
        command = RemoveTraces(job_id=JOB, fence=1, trace_ids=(trace,))
        assert bucket.names() == {name}
        storage.remove_traces(command)
    assert bucket.names() == set()
    assert path.exists() is refuses


@pytest.mark.parametrize(
    ("amiss", "words"),
    [
        (Fault(methods=("DELETE", "POST"), code="AccessDenied", status=403), "AccessDenied"),
        (Fault(methods=("GET",), status=200, says="<html>Please log in"), "what no object store"),
    ],
    ids=["refused", "a page"],
)
def test_a_bucket_that_fails_after_the_start_is_told_and_that_it_is_well_again(
    bucket: Place, amiss: Fault, words: str
) -> None:
    files = bucket.on("node-1").files
    found, told = look(files), asyncio.Queue[tuple[str | None, str | None]]()
    assert found[0] is not None
    assert found[1] is None
    assert bucket.server is not None
    server = bucket.server

    async def watch() -> None:
        watching = asyncio.create_task(
            watch_storage(files, found, lambda *now: told.put_nowait(now), every_s=0.02)
        )
        await asyncio.to_thread(server.fail, amiss)
        name, fault = await told.get()
        assert name == found[0]
        assert words in (fault or "")
        await asyncio.to_thread(server.repair)
        assert await told.get() == found
        watching.cancel()

    asyncio.run(watch())


def test_copies_of_a_job_that_was_purged_elsewhere_go(bucket: Place) -> None:
    bucket.on("node-1").open_attempt(launch(1))
    other = bucket.on("node-2")
    assert other.find_job(JOB, None, 0) != ()
    assert purge(bucket.on("node-1"), PurgeJob(job_id=JOB, fence=1), "node-1").error is None
    other.files.jobs()
    assert (other.root / JOB).is_dir()  # an attempt may have been about to be opened
    other.files.jobs()
    assert not (other.root / JOB).exists()


def test_code_whose_upload_was_refused_is_uploaded_by_the_next_launch(
    bucket: Place, tmp_path: Path
) -> None:
    assert bucket.server is not None
    files = bucket.on("node-1").files
    no_redis: Any = None
    cache = CodeCache(no_redis, tmp_path / "code", files)
    bucket.server.fail(Fault(methods=("PUT",)))
    with pytest.raises(StorageAwayError):
        cache._keep_copy(files.root / JOB, b"an archive")
    bucket.server.repair()
    cache._keep_copy(files.root / JOB, b"an archive")
    (name,) = bucket.names()
    other = bucket.on("node-2").root / JOB / name
    bucket.on("node-2").files.pull_file(other)
    assert other.read_bytes() == b"an archive"
