"""Ranks of a system user of their own: they train and checkpoint, and read nothing of the agent's."""

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.errors import CliError
from services.contract.jobs.traces import TraceRequest
from services.contract.system.rank_user import RankUser
from services.contract.words.states import JobState, TraceState
from services.local.settings import child_environment
from tests.agent.conftest import is_gone
from tests.e2e.conftest import LONG, Stack, running_stack
from tests.s3_server import BUCKET, s3_server
from tests.waiting import until

USER = pwd.getpwnam("nobody")


CODE = Path(__file__).parents[2]
# A view of the file system in which a folder that only root enters holds nothing but what is kept,
# and others may enter it.
OPENED = """
set -e
shut=$1 count=$2
shift 2
mount --make-rprivate /
kept=("${@:1:count}") held=()
for path in "${kept[@]}"; do
    held+=("$(mktemp -d)")
    mount --bind "$path" "${held[-1]}"
done
mount -t tmpfs -o mode=755 tmpfs "$shut"
for place in "${!kept[@]}"; do
    mkdir -p "${kept[place]}"
    mount --move "${held[place]}" "${kept[place]}"
    rmdir "${held[place]}"
done
exec "${@:count + 1}"
"""


def opened() -> list[str]:
    """A command that becomes the one behind it, where other users can read this interpreter."""
    paths = dict.fromkeys((Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), CODE))
    above = sorted({folder for path in paths for folder in (path, *path.parents)})
    shut = next((folder for folder in above if not folder.stat().st_mode & 0o001), None)
    kept = [str(path) for path in paths if shut in path.parents]
    if shut is None or not kept:
        return []
    return ["unshare", "--mount", "bash", "-c", OPENED, "bash", str(shut), str(len(kept)), *kept]


# Begins where only root gets to, with a key in its session's keyring, if the kernel has any.
WITH_A_KEY = """
import ctypes, os, platform, sys
numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine())
if numbers:
    call = ctypes.CDLL(None).syscall
    call(numbers[1], 1, None)
    call(numbers[0], b"user", b"of the agent", b"secret", 6, -3)
os.chdir(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""


def cannot_be_tried() -> str | None:
    if os.getuid() != 0:
        return "only root can run ranks as another user"
    become = ["setpriv", f"--reuid={USER.pw_uid}", f"--regid={USER.pw_gid}", "--clear-groups"]
    tried = [
        *opened(),
        *become,
        sys.executable,
        "-c",
        "import pydantic, services.contract.words.ids",
    ]
    try:
        subprocess.run(tried, capture_output=True, check=True, cwd=CODE)
    except (OSError, subprocess.CalledProcessError):
        return "this interpreter lies where other users cannot read it"
    return None


def may_gain_rights(pid: int) -> set[str]:
    """The threads of a process that would gain rights by a program such as sudo; they have root's keyring, too."""
    said = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            said[thread.name] = (thread / "status").read_text()
    assert len(said) > 1
    return {thread for thread, status in said.items() if "NoNewPrivs:\t1\n" not in status}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where another user can get to, other than below pytest's own folder."""
    reason = cannot_be_tried()
    if reason is not None:
        pytest.skip(reason)
    # torch sets it in the process of any test that compiles: an agent takes it for its operator's setting.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def test_ranks_of_another_user_train_checkpoint_resume_and_end_with_their_agent(
    home: Path,
) -> None:
    begun_in = home / "of root" / "open"
    begun_in.mkdir(parents=True)
    begun_in.parent.chmod(0o700)
    begun_in.chmod(0o755)
    with_a_key = [sys.executable, "-c", WITH_A_KEY, str(begun_in)]
    with running_stack(home, *opened(), *with_a_key, MESHLOOM_RANK_USER=USER.pw_name) as stack:
        agent = stack.part("services.worker.agent")
        redis = home / "redis"
        private = [f"/proc/{agent.pid}/environ", "/proc/parent/environ"]
        private += map(str, (redis / "redis.conf", redis / "password", home / "owner.lock"))
        job_id = stack.submit(
            model={
                "factory": "curious_models:CuriousDecoder",
                "args": {"files": private, "pace_s": 0.03, "dim": 32, "layers": 2, "heads": 2},
            },
            train={"steps": 10**6, "global_batch": 4, "seed": 7},
            checkpoint={"every_steps": 20},
        ).id
        stack.at_step(job_id, 20)
        until(lambda: stack.job(job_id).latest_checkpoint)
        told = f"as {(USER.pw_uid,) * 3} {os.getgrouplist(USER.pw_name, USER.pw_gid)}"
        said = {
            f"{told}: ['PermissionError']",
            "may compile: True",
            "in /, with the agent's key: False",
        }
        until(lambda: said <= {line.text for line in stack.client.logs(job_id)})
        assert Path(f"/proc/{agent.pid}/cwd").readlink() == begun_in
        ranks = [psutil.Process(r.pid) for r in stack.client.ranks(job_id).items if r.pid]
        assert {rank.uids().real for rank in ranks} == {USER.pw_uid}
        assert may_gain_rights(ranks[0].pid) == set()
        of_rank_0 = {"metrics.jsonl", "events.out.tfevents.0000000001.attempt-1"}

        def written() -> bool:
            found = [file for file in home.glob("**/attempt-1/**/*") if file.name in of_rank_0]
            return len(found) == 2 and all(file.stat().st_size for file in found)

        until(written)
        trace = stack.client.record_trace(job_id, TraceRequest(steps=1))
        until(lambda: stack.client.trace(job_id, trace.id).state is TraceState.DONE)
        stack.client.diagnose(job_id)
        until(lambda: diagnosed(stack, job_id))
        before = stack.job(job_id).attempt
        os.kill(ranks[0].ppid(), signal.SIGSTOP)  # so that the kernel alone can end its ranks
        agent.kill()
        until(lambda: all(is_gone(rank.pid) for rank in ranks))
        again = until(lambda: job if (job := stack.job(job_id)).attempt > before else None)
        assert again.latest_checkpoint is not None
        until(lambda: stack.client.attempts(job_id).items[-1].first_step_at)
        assert stack.client.attempts(job_id).items[-1].resumed_from is not None
        stack.client.kill(job_id)
        until(lambda: stack.job(job_id).state is JobState.CANCELLED)


def test_ranks_of_another_user_keep_checkpoints_in_a_bucket_and_load_them(home: Path) -> None:
    with (
        s3_server() as s3,
        running_stack(
            home,
            *opened(),
            MESHLOOM_RANK_USER=USER.pw_name,
            MESHLOOM_CHECKPOINT_ROOT=f"s3://{BUCKET}/runs",
            **s3.environment,
        ) as stack,
    ):
        endless = {**LONG, "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7}}
        job_id = stack.submit(**endless, resources={"ranks": 1, "device": "cpu"}).id
        until(lambda: stack.job(job_id).latest_checkpoint)
        # The second one already, where a slow machine had cost the node its lease.
        before = stack.job(job_id).attempt
        (rank,) = stack.client.ranks(job_id).items
        # Alone on a node it has threads to compute with.
        assert may_gain_rights(rank.pid or 0) == set()
        stack.part("services.worker.agent").kill()  # the next one has no copies of shards
        until(lambda: stack.job(job_id).attempt > before)
        until(lambda: stack.client.attempts(job_id).items[-1].first_step_at)
        assert stack.client.attempts(job_id).items[-1].resumed_from is not None
        assert (home / "copies").stat().st_mode & 0o777 == 0o711
        stack.client.kill(job_id)


# Of no process of this machine, so that tests beside this one keep nothing from being freed.
LEAVING = RankUser("left", 1_234_567_891, 1_234_567_891, "/")
LEAVES = """
import ctypes, sys
from pathlib import Path
Path(sys.argv[1]).mkdir()
Path(sys.argv[1], "of a rank").touch()
library = ctypes.CDLL(None)
made = (library.shmget(0, 4096, 0o600), library.semget(0, 1, 0o600), library.msgget(0, 0o600))
assert -1 not in made
print("left", flush=True)
sys.stdin.read()
"""
FREES = """
import asyncio, os, sys
from services.contract.system.rank_user import RankUser
from services.worker.agent.host.left_memory import free_left_memory, has_left, remove_as
user = RankUser("left", int(sys.argv[1]), int(sys.argv[1]), "/")
async def free():
    freeing = asyncio.create_task(free_left_memory(user, os.environ, lambda: True))
    while has_left(user.uid):
        await asyncio.sleep(0.02)
    freeing.cancel()
asyncio.run(remove_as(user, os.environ) if sys.argv[2] == "while a process lives" else free())
print(has_left(user.uid))
"""


def test_shared_memory_that_ranks_left_is_freed_once_none_of_their_processes_lives() -> None:
    reason = cannot_be_tried()
    if reason is not None:
        pytest.skip(reason)
    place = Path("/dev/shm") / f"left-{os.getpid()}"  # noqa: S108 what is meant
    become = ["setpriv", f"--reuid={LEAVING.uid}", f"--regid={LEAVING.gid}", "--clear-groups"]

    def frees(when: str) -> str:
        command = [*opened(), sys.executable, "-c", FREES, str(LEAVING.uid), when]
        return subprocess.run(
            command, cwd=CODE, stdout=subprocess.PIPE, check=True, text=True
        ).stdout

    leaving = subprocess.Popen(
        [*opened(), *become, sys.executable, "-c", LEAVES, str(place)],
        cwd=CODE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert leaving.stdout is not None
        assert leaving.stdout.readline() == b"left\n"
        assert frees("while a process lives") == "True\n"
        assert (place / "of a rank").exists()
        leaving.communicate()
        until(lambda: time.time() >= int(place.stat().st_ctime) + 1)  # in whole seconds
        assert frees("once none does") == "False\n"
        assert not place.exists()
    finally:
        leaving.kill()
        leaving.wait()


def diagnosed(stack: Stack, job_id: str) -> bool:
    """Whether the agent has seen the stacks of both ranks."""
    with contextlib.suppress(CliError):
        return {found.rank for found in stack.client.diagnosis(job_id).stacks} == {0, 1}
    return False


@pytest.mark.parametrize("name", ["no-such-user", "root"])
def test_an_agent_refuses_a_user_that_ranks_cannot_become(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.worker.agent"],
        env=child_environment(MESHLOOM_REDIS_URL="redis://nowhere", MESHLOOM_RANK_USER=name),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("meshloom agent: MESHLOOM_RANK_USER: ")
    assert name in done.stderr
