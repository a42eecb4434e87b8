"""A backup is of one moment, however much is written, replaced and retired while it is made."""

import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from services.contract.storage.bucket import Bucket
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    Manifest,
    ShardFile,
)
from services.contract.storage.storage_address import BucketAddress
from services.contract.words.ids import checkpoint_id, new_job_id
from services.controller.acl import acl_file
from services.controller.backup import BackupError, restore, save
from tests.s3_server import BUCKET, Fault, S3Server, s3_server
from tests.waiting import until

pytestmark = pytest.mark.system

JOB = new_job_id(1, bytes(10))
OTHER = new_job_id(2, bytes(10))
SHARD_BYTES = 400_000
KEPT = 10
PACE_S = 0.02
PASSWORD = "0123456789abcdef"  # noqa: S105 of a server that lives for a moment
# As the command does, and then says whether others of its user can read its environment (PR_GET_DUMPABLE).
SAVES = """
import ctypes
from services.controller.backup import main
main()
print("shown" if ctypes.CDLL(None).prctl(3) else "hidden")
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Redis's folder with an append-only file, a storage with one open job, and where backups go."""
    aof = tmp_path / "redis" / "appendonlydir"
    aof.mkdir(parents=True)
    (aof / "appendonly.aof.1.incr.aof").write_bytes(b"")
    (aof / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    (tmp_path / "storage").mkdir()
    CommitChain(tmp_path / "storage", JOB).append(AttemptOpened(job_id=JOB, fence=1))
    return tmp_path / "redis", tmp_path / "storage", tmp_path / "backup"


def commit(chain: CommitChain, step: int) -> Manifest:
    """A checkpoint of two shards."""
    name = checkpoint_id(JOB, step, 1)
    folder = chain.shard_folder(name)
    folder.mkdir(parents=True)
    shards = []
    for rank in range(2):
        content = f"{step} {rank} ".encode() * (SHARD_BYTES // 8)
        (folder / f"rank-{rank}").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(ShardFile(rank=rank, name=f"rank-{rank}", bytes=len(content), sha256=digest))
    manifest = Manifest(
        job_id=JOB, checkpoint_id=name, fence=1, step=step, world_size=2, shards=tuple(shards)
    )
    chain.append(manifest)
    return manifest


def retire(chain: CommitChain, manifest: Manifest) -> None:
    name = manifest.checkpoint_id
    chain.append(CheckpointDeleted(job_id=JOB, checkpoint_id=name, fence=1))
    shutil.rmtree(chain.shard_folder(name))


def committed_whole(backup: Path) -> list[int]:
    """The steps of the checkpoints that a backup commits, all of whose shards are what was voted."""
    chain = CommitChain(backup / "checkpoints", JOB)
    committed = chain.committed()
    for manifest in committed:
        for shard in manifest.shards:
            content = (chain.shard_folder(manifest.checkpoint_id) / shard.name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256
    return [manifest.step for manifest in committed]


@contextmanager
def meanwhile(act: Callable[[int], None]) -> Iterator[None]:
    """``act`` on 1, 2, … in a thread, fifty times a second at most, until the block ends.

    As fast as a disk can, a chain grows while it is read: then no copy would ever be of one moment.
    """
    stop = threading.Event()
    faults: list[BaseException] = []

    def run() -> None:
        step = 0
        try:
            while not stop.wait(PACE_S):
                step += 1
                act(step)
        except BaseException as fault:  # noqa: BLE001 raised again below
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert faults == []


def test_each_commit_of_a_copy_has_its_shards_while_checkpoints_are_made_and_retired(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    alive: list[Manifest] = []

    steps, copied, due = itertools.count(1), itertools.count(1), threading.Semaphore(0)

    def commit_and_retire() -> None:
        alive.append(commit(chain, next(steps)))
        if len(alive) > KEPT:
            retire(chain, alive.pop(KEPT // 2))

    def as_due(_turn: int) -> None:
        if due.acquire(blocking=False):
            commit_and_retire()

    def count(path: object) -> None:
        # One for five shards that are copied, however slow the machine is.
        if str(path).startswith(str(backup)) and "/rank-" in str(path) and next(copied) % 5 == 0:
            due.release()

    for _ in range(3 * KEPT):
        commit_and_retire()
    _opening.append(count)
    try:
        with meanwhile(as_due):
            for number in range(10):
                assert save(redis, storage, backup / str(number)) == 1
    finally:
        _opening.remove(count)
    newest = [committed_whole(backup / str(number))[-1] for number in range(10)]
    assert newest == sorted(newest)
    assert newest[0] < newest[-1], "nothing was committed meanwhile"


def test_a_retired_checkpoint_has_no_other_copied_a_second_time(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    last = [commit(chain, step) for step in (1, 2, 3)][-1]
    copied: list[str] = []

    def retire_the_last(path: object) -> None:
        if str(path).startswith(f"{backup}.unfinished/") and "/rank-" in str(path):
            copied.append(str(path))
            if len(copied) == 1:
                retire(chain, last)
                commit(chain, 4)

    _opening.append(retire_the_last)
    try:
        assert save(redis, storage, backup) == 1
    finally:
        _opening.remove(retire_the_last)
    assert committed_whole(backup) == [1, 2, 4]
    assert len(copied) == len(set(copied)) == 6
    folders_of_shards = (backup / "checkpoints" / JOB / "shards").iterdir()
    assert len(list(folders_of_shards)) == 3


@pytest.mark.parametrize("name", [JOB, f".purged-{JOB}-0123456789abcdef"])
def test_a_job_that_is_deleted_while_its_chain_is_copied_keeps_no_backup_from_the_others(
    folders: tuple[Path, Path, Path], name: str
) -> None:
    """Nothing of it was committed yet, or it was being removed already: the end of its folder ended the backup."""
    redis, storage, backup = folders
    CommitChain(storage, OTHER).append(AttemptOpened(job_id=OTHER, fence=1))
    (storage / JOB).rename(storage / name)

    def delete(path: object) -> None:
        if str(path).startswith(f"{backup}.unfinished/") and f"/{name}/chain/" in str(path):
            shutil.rmtree(storage / name, ignore_errors=True)

    _opening.append(delete)
    try:
        assert save(redis, storage, backup) == 1
    finally:
        _opening.remove(delete)
    assert [path.name for path in (backup / "checkpoints").iterdir()] == [OTHER]


def test_a_damaged_shard_is_not_saved_as_if_it_were_whole(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    manifest = commit(chain, 1)
    path = chain.shard_folder(manifest.checkpoint_id) / "rank-0"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(BackupError, match=r"rank-0 is damaged: its sha256 is"):
        save(redis, storage, backup)
    assert not backup.exists()


def test_a_damaged_record_is_named_for_what_it_commits_is_not_saved(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    for step in (1, 2):
        commit(chain, step)
    record = storage / JOB / "chain" / "00000002.json"
    record.write_bytes(record.read_bytes().replace(b"rank-0", b"rank-9"))
    assert save(redis, storage, backup) == 1
    assert committed_whole(backup) == [2]
    said = capsys.readouterr().err
    assert said.startswith(f"backup: '{JOB}/chain/00000002.json' is damaged: if it commits")
    assert said.count("\n") == 1


def test_a_link_among_the_shards_is_not_followed(folders: tuple[Path, Path, Path]) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    manifest = commit(chain, 1)
    folder = chain.shard_folder(manifest.checkpoint_id)
    moved = folder.rename(storage / "elsewhere")
    folder.symlink_to(moved)
    with pytest.raises(BackupError, match="is a link"):
        save(redis, storage, backup)


def test_a_job_whose_folder_is_a_link_is_not_left_out_of_a_backup_without_a_word(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    moved = (storage / JOB).rename(storage.parent / "other disk")
    (storage / JOB).symlink_to(moved)
    assert CommitChain(storage, JOB).committed()
    with pytest.raises(BackupError, match=f"{JOB} is a link and no folder of a job"):
        save(redis, storage, backup)
    assert not backup.exists()


def test_what_a_rank_left_to_prevent_copies_is_left_out_and_named(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    manifest = commit(chain, 1)
    traces = storage / JOB / "traces"
    traces.mkdir()
    with (traces / "\x1b[2J").open("wb") as file:
        file.truncate(1 << 42)
    (traces / "kept").write_bytes(b"x")
    traces.joinpath(*"d" * 40).mkdir(parents=True)  # it could be more than Python calls itself
    assert save(redis, storage, backup) == 1
    saved = backup / "checkpoints" / JOB / "traces"
    assert (saved / "d/d/d").is_dir()
    assert (saved / "kept").read_bytes() == b"x"
    told = capsys.readouterr().err.splitlines()
    assert [line.endswith("of it is holes") for line in sorted(told)] == [True, False]
    assert "\x1b" not in "".join(told)
    path = chain.shard_folder(manifest.checkpoint_id) / "rank-0"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(BackupError, match=r"rank-0 is damaged: its sha256 is that of a file full"):
        save(redis, storage, backup.with_name("second"))


def test_what_a_rank_left_beside_the_jobs_stops_no_backup(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    redis, storage, backup = folders
    os.mkfifo(storage / "pipe")
    with (storage / "holes").open("wb") as file:
        file.truncate(1 << 42)
    (storage / "kept").write_bytes(b"x")
    with leased(storage / "held"):
        assert save(redis, storage, backup) == 1
    assert sorted(path.name for path in (backup / "checkpoints").iterdir()) == [JOB, "kept"]
    told = sorted(capsys.readouterr().err.splitlines())
    assert [line.partition(" is left out")[0] for line in told] == [
        f"backup: '{storage / name}'" for name in ("held", "holes")
    ]


def test_a_file_on_which_a_rank_holds_a_lease_stops_no_backup_unless_a_checkpoint_needs_it(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    manifest = commit(chain, 1)
    trace = storage / JOB / "traces" / "trace"
    trace.parent.mkdir()
    with leased(trace):
        assert save(redis, storage, backup) == 1
    assert "traces/trace' is left out: it cannot be opened" in capsys.readouterr().err
    shard = chain.shard_folder(manifest.checkpoint_id) / "rank-0"
    with leased(shard), pytest.raises(BackupError, match=rf"{shard} cannot be read while a proc"):
        save(redis, storage, backup.with_name("second"))


@contextmanager
def leased(file: Path) -> Iterator[None]:
    noticed = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, noticed)


def test_a_folder_that_a_rank_replaces_while_it_is_copied_leads_nowhere_else(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    trace, private = storage / JOB / "traces" / "trace", storage.parent / "private"
    for folder in (trace / "inner", private / "inner"):
        folder.mkdir(parents=True)
        (folder / folder.parent.name).write_bytes(b"x")
    with before_it_is_listed(trace, lambda: trace.rename(trace.with_name("moved"))) as replaced:
        save(redis, storage, backup)
    assert replaced
    saved = {path.name for path in (backup / "checkpoints" / JOB / "traces").rglob("*")}
    assert "trace" in saved
    assert "private" not in saved


_watching: list[Callable[[object], None]] = []
_opening: list[Callable[[object], None]] = []


def _tell(event: str, args: tuple[object, ...]) -> None:
    for watch in _watching if event in ("os.listdir", "os.scandir") else ():
        watch(args[0])
    for watch in _opening if event == "open" else ():
        watch(args[0])


sys.addaudithook(_tell)  # for good: there is no way to take one back


@contextmanager
def before_it_is_listed(folder: Path, act: Callable[[], object]) -> Iterator[list[Path]]:
    """A link to ``private`` comes in the place of ``folder`` at the moment in which somebody begins to list it."""
    replaced: list[Path] = []

    def watch(listed: object) -> None:
        path = f"/proc/self/fd/{listed}" if isinstance(listed, int) else str(listed)
        if not replaced and os.path.realpath(path) == str(folder):
            replaced.append(folder)
            act()
            folder.symlink_to(folder.parents[3] / "private")

    _watching.append(watch)
    try:
        yield replaced
    finally:
        _watching.remove(watch)


def test_a_file_that_grows_while_it_is_copied_is_copied_as_it_was(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    trace = storage / JOB / "traces" / "trace"
    trace.parent.mkdir()
    trace.write_bytes(b"x" * SHARD_BYTES)

    def grow(path: object) -> None:
        # At the moment in which its copy is made, its own length is known.
        if str(path).endswith("traces/trace") and str(path).startswith(f"{backup}."):
            os.truncate(trace, 100 * SHARD_BYTES)

    _opening.append(grow)
    try:
        save(redis, storage, backup)
    finally:
        _opening.remove(grow)
    assert trace.stat().st_size == 100 * SHARD_BYTES
    assert (backup / "checkpoints" / JOB / "traces" / "trace").stat().st_size == SHARD_BYTES


def test_no_file_of_a_backup_gives_whoever_runs_it_the_rights_of_its_owner(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    trace = storage / JOB / "traces" / "trace"
    trace.parent.mkdir()
    trace.touch()
    trace.chmod(0o6755)
    save(redis, storage, backup)
    assert (backup / "checkpoints" / JOB / "traces" / "trace").stat().st_mode & 0o7777 == 0o755


def test_a_part_of_a_backup_may_be_a_link_to_another_disk(folders: tuple[Path, Path, Path]) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    save(redis, storage, backup)
    for part in ("redis", "checkpoints"):
        elsewhere = backup.with_name(part + " elsewhere")
        (backup / part).rename(elsewhere)
        (backup / part).symlink_to(elsewhere)
    new = backup.with_name("new")
    assert restore(new / "redis", new / "checkpoints", backup) == 1
    assert len(CommitChain(new / "checkpoints", JOB).committed()) == 1


def test_save_replaces_no_backup_and_restore_no_data(folders: tuple[Path, Path, Path]) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    save(redis, storage, backup)
    with pytest.raises(BackupError, match="is there"):
        save(redis, storage, backup)
    with pytest.raises(BackupError, match="is not empty"):
        restore(redis, storage, backup)
    with pytest.raises(BackupError, match="no backup"):
        restore(redis, storage, storage)


def test_without_an_append_only_file_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="--appendonly yes"):
        save(tmp_path, tmp_path, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_redis_whose_files_no_single_manifest_names_is_refused(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    manifest = redis / "appendonlydir" / "appendonly.aof.manifest"
    # Of another `appendfilename` than now; while Redis rewrites its file there is one that is not in force.
    other = manifest.with_name("tasks.aof.manifest")
    shutil.copy(manifest, other)
    shutil.copy(manifest, manifest.with_name("temp-appendonly.aof.manifest"))
    with pytest.raises(BackupError, match="2 manifests, where Redis has one"):
        save(redis, storage, backup)
    manifest.unlink()
    assert save(redis, storage, backup) == 1
    other.unlink()
    with pytest.raises(BackupError, match="0 manifests, where Redis has one"):
        save(redis, storage, backup.with_name("second"))


@contextmanager
def append_only_redis(
    folder: Path, users: Path | None = None, username: str | None = None
) -> Iterator[Redis]:
    """A Redis 7 that writes each change to its file before it answers, and a client that is this user."""
    folder.mkdir(exist_ok=True)
    path = folder.parent / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
    command += [] if users is None else ["--aclfile", str(users)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(redis.ping())
        except RedisConnectionError:
            return False

    try:
        with Redis(
            unix_socket_path=str(path),
            decode_responses=True,
            username=username,
            password=username and PASSWORD,
        ) as redis:
            until(answers)
            yield redis
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="PATH has no redis-server")
def test_all_that_redis_had_acknowledged_is_in_a_copy_that_is_made_while_it_rewrites_its_file(
    tmp_path: Path,
) -> None:
    source, storage = tmp_path / "source", tmp_path / "storage"
    storage.mkdir()
    rewrites = []
    with append_only_redis(source) as redis:
        said = redis.info("server")["redis_version"]
        if int(str(said).split(".", maxsplit=1)[0]) < 7:
            pytest.skip(f"redis-server is {said}: its append-only file is another one before 7")

        def write(step: int) -> None:
            redis.set(f"key:{step}", "x" * 1000)
            if step % 50 == 0 and not redis.info("persistence")["aof_rewrite_in_progress"]:
                redis.bgrewriteaof()
                rewrites.append(step)

        counts = []
        with meanwhile(write):
            for number in range(5):
                until(lambda number=number: len(rewrites) > 2 * number)  # type: ignore[misc]
                counts.append(redis.dbsize())
                save(source, storage, tmp_path / f"backup-{number}")
    for number, count in enumerate(counts):
        target = tmp_path / f"target-{number}"
        restore(target, tmp_path / f"storage-{number}", tmp_path / f"backup-{number}")
        with append_only_redis(target) as redis:
            assert redis.exists(*(f"key:{step}" for step in range(1, count + 1))) == count


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="PATH has no redis-server")
def test_a_redis_with_our_users_starts_again_with_what_transactions_and_scripts_wrote(
    tmp_path: Path,
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(acl_file(PASSWORD, [("node-1", "fedcba9876543210")]))
    with append_only_redis(tmp_path / "redis") as bare:
        if int(str(bare.info("server")["redis_version"]).split(".", maxsplit=1)[0]) < 7:
            pytest.skip("the users need Redis 7")
    with append_only_redis(tmp_path / "redis", users, "controller") as redis:
        with redis.pipeline(transaction=True) as transaction:
            transaction.set("ml:one", "1")
            transaction.set("ml:two", "2")
            transaction.execute()
        script = "redis.call('SET', KEYS[1], '3') redis.call('SET', KEYS[2], '4')"
        redis.eval(script, 2, "ml:three", "ml:four")
    with append_only_redis(tmp_path / "redis", users, "controller") as redis:
        kept = redis.mget("ml:one", "ml:two", "ml:three", "ml:four")
        assert kept == ["1", "2", "3", "4"]
        # No other user comes in, not even with an empty password.
        for name, password in ((None, None), ("default", ""), ("default", "x")):
            with (
                Redis(
                    unix_socket_path=str(tmp_path / "redis.sock"), username=name, password=password
                ) as other,
                pytest.raises((AuthenticationError, ResponseError)),
            ):
                other.get("ml:one")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def uploaded(storage: Path, prefix: str) -> Bucket:
    """A bucket with all that a storage holds."""
    bucket = Bucket(BucketAddress(BUCKET, prefix))
    for name in contents(storage):
        bucket.upload(name, storage / name)
    return bucket


def test_a_bucket_is_saved_and_restored_with_what_its_chains_commit(
    folders: tuple[Path, Path, Path], server: S3Server, tmp_path: Path
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    for step in (1, 2):
        commit(chain, step)
    records = storage / JOB / "records"
    records.mkdir()
    (records / "steps.jsonl.gz").write_bytes(b"a curve")
    (storage / JOB / "job.json").write_bytes(b"{}")
    (storage / ".storage-id").write_bytes(b"0" * 32)
    bucket = uploaded(storage, "saved")
    server.client().put_object(
        Bucket=BUCKET, Key=f"saved/{JOB}/shards/not-committed/rank-0", Body=b"half a checkpoint"
    )
    assert save(redis, bucket.address, backup) == 1
    assert contents(backup / "checkpoints") == contents(storage)
    address = BucketAddress(BUCKET, "restored")
    assert restore(tmp_path / "new", address, backup) == 1
    keys = {key.removeprefix("restored/") for key in server.keys("restored/")}
    assert keys == contents(storage).keys()
    with pytest.raises(BackupError, match="s3://checkpoints/restored is not empty"):
        restore(tmp_path / "newer", address, backup)
    shard = next(name for name in contents(storage) if name.endswith("rank-1"))
    server.client().put_object(Bucket=BUCKET, Key=f"saved/{shard}", Body=b"something else")
    with pytest.raises(BackupError, match=f"s3://checkpoints/saved/{shard} is damaged"):
        save(redis, bucket.address, tmp_path / "other")


def test_what_a_bucket_answers_reaches_the_terminal_as_one_line_of_text(
    folders: tuple[Path, Path, Path], server: S3Server
) -> None:
    """A terminal obeys U+009B as it does an escape, and XML may hold it."""
    redis, _, backup = folders
    server.fail(Fault(code="No\x9b31m\u202e\nbackup: done", status=403))
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "services.controller.backup", "save"),
                *("--redis", redis, "--checkpoints", str(BucketAddress(BUCKET, "saved")), backup),
            ],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        server.repair()
    assert done.returncode == 1
    assert done.stderr.startswith(
        r"backup: s3://checkpoints/saved answers No\x9b31m\u202e\nbackup: done (HTTP 403)"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("server")
def test_nobody_else_reads_what_a_bucket_was_saved_to_nor_the_variables_of_who_saves_it(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    saving = ["save", "--redis", redis, "--checkpoints", uploaded(storage, "private").address]
    done = subprocess.run(
        [sys.executable, "-c", SAVES, *map(str, saving), backup],
        umask=0o022,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "hidden"
    shared = [path for path in (backup / "checkpoints").rglob("*") if path.stat().st_mode & 0o077]
    assert not shared
    assert (backup / "checkpoints").stat().st_mode & 0o077 == 0


def test_a_file_whose_name_no_object_can_have_keeps_no_backup_out_of_a_bucket(
    folders: tuple[Path, Path, Path],
    server: S3Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    kept = contents(storage).keys()
    traces = storage / JOB / "traces"
    deep = traces.joinpath(*["d" * 250] * 4)
    deep.mkdir(parents=True)
    left_out = [deep / "too long", traces / os.fsdecode(b"\xe9"), traces / "\x1b[2J"]
    for path in left_out:
        path.write_bytes(b"of a rank")
    assert save(redis, storage, backup) == 1
    assert capsys.readouterr().err == ""
    assert restore(tmp_path / "new", BucketAddress(BUCKET, "named"), backup) == 1
    assert {key.removeprefix("named/") for key in server.keys("named/")} == kept
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(left_out)
    assert all(line.endswith("is left out: no object can have its name") for line in told)


@pytest.mark.parametrize(
    "name",
    [
        "../chain/0000",
        "../../../planted",
        f"{JOB}/../../../planted",
        f"{JOB}/traces/../../../../planted",
        f"{JOB}/chain/..",
        f"{JOB}/traces/.",
        f"{JOB}/traces//planted",
        f"{JOB}/chain/a\0b",
        "",
        f"{JOB}/chain/",
        f"{JOB}/traces/{'n' * 300}",
    ],
)
def test_an_object_that_no_file_could_be_named_as_is_none_of_ours(
    folders: tuple[Path, Path, Path], server: S3Server, tmp_path: Path, name: str
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    prefix = hashlib.sha256(name.encode()).hexdigest()[:16]
    bucket = uploaded(storage, prefix)
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"of an agent")
    around = set(tmp_path.iterdir())
    assert save(redis, bucket.address, backup) == 1
    assert contents(backup / "checkpoints") == contents(storage)
    assert set(tmp_path.iterdir()) - around == {backup}
    assert {path.name for path in backup.iterdir()} == {"redis", "checkpoints"}


def test_a_folder_that_a_console_made_in_a_bucket_is_empty(
    folders: tuple[Path, Path, Path], server: S3Server, tmp_path: Path
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    assert save(redis, storage, backup) == 1
    server.client().put_object(Bucket=BUCKET, Key="made/", Body=b"")
    assert restore(tmp_path / "new", BucketAddress(BUCKET, "made"), backup) == 1


@pytest.mark.parametrize("name", [JOB, f"{JOB}/chain", f"{JOB}/records"])
def test_an_object_that_has_the_name_of_a_folder_keeps_no_backup_from_that(
    folders: tuple[Path, Path, Path],
    server: S3Server,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    (storage / JOB / "records").mkdir()
    (storage / JOB / "records" / "steps.jsonl.gz").write_bytes(b"a curve")
    bucket = uploaded(storage, f"named-as-{name}".replace("/", "-"))
    server.client().put_object(Bucket=BUCKET, Key=f"{bucket.address.prefix}/{name}", Body=b"other")
    assert save(redis, bucket.address, backup) == 1
    assert contents(backup / "checkpoints") == contents(storage)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{name}' is left out: a folder has its name")


@pytest.mark.usefixtures("server")
def test_a_job_that_is_deleted_from_a_bucket_while_its_chain_is_copied_ends_no_backup(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    commit(CommitChain(storage, JOB), 1)
    CommitChain(storage, OTHER).append(AttemptOpened(job_id=OTHER, fence=1))
    bucket = uploaded(storage, "deleted-meanwhile")

    def delete(path: object) -> None:
        if str(path).startswith(f"{backup}.unfinished/") and f"/{JOB}/chain/" in str(path):
            bucket.remove(JOB)

    _opening.append(delete)
    try:
        assert save(redis, bucket.address, backup) == 1
    finally:
        _opening.remove(delete)
    assert [path.name for path in (backup / "checkpoints").iterdir()] == [OTHER]


@pytest.mark.usefixtures("server")
def test_a_bucket_is_saved_whole_while_checkpoints_come_and_go(
    folders: tuple[Path, Path, Path],
) -> None:
    redis, storage, backup = folders
    chain = CommitChain(storage, JOB)
    bucket = uploaded(storage, "busy")
    kept: list[Manifest] = []

    def upload_new_records() -> None:
        there = bucket.names(f"{JOB}/chain")
        for path in sorted(set((storage / JOB / "chain").iterdir())):
            if path.name not in there:
                bucket.upload(f"{JOB}/chain/{path.name}", path)

    def train(step: int) -> None:
        kept.append(commit(chain, step))
        folder = f"{JOB}/shards/{kept[-1].checkpoint_id}"
        for shard in kept[-1].shards:
            bucket.upload(f"{folder}/{shard.name}", storage / folder / shard.name)
        upload_new_records()
        if len(kept) > KEPT // 2:
            old = kept.pop(0)
            retire(chain, old)
            upload_new_records()
            bucket.remove(f"{JOB}/shards/{old.checkpoint_id}")

    def train_for_a_while(step: int) -> None:
        if step < 3 * KEPT:
            train(step + 1)
        else:
            threading.Event().wait(0.05)

    train(1)
    with meanwhile(train_for_a_while):
        until(lambda: len(chain.read().heads) > KEPT)
        assert save(redis, bucket.address, backup) == 1
    assert committed_whole(backup)
