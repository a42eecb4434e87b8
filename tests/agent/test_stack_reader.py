"""What is stopped cannot answer, and is looked into from outside."""

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from services.contract.messages.facts import Fact, GangDiagnosed
from services.contract.messages.rank_stacks import STACKS_SIGNAL, stacks_path
from services.contract.system.mask import NOTHING_MASKED, Mask
from services.worker.agent.gangs.events import DiagnosisAsked
from services.worker.agent.gangs.runtime import GangRuntime
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.stack_reader import TEXT_KEPT, spied_frames, spy
from services.worker.agent.host.stacks import collect
from services.worker.agent.ranks.launch import Crew
from services.worker.agent.storage.shared_files import FolderFiles
from tests.agent.conftest import JOB, NODE
from tests.agent.test_metrics import watched
from tests.waiting import until

SLEEPER = """
import threading
def outer():
    inner()
def inner():
    print("ready", flush=True)
    threading.Event().wait()
outer()
"""


def test_the_stack_of_a_stopped_process_is_seen_and_it_stays_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: stands_still(process.pid))
            text = asyncio.run(spy(process.pid))
            assert (text is not None) == may_look_into(process.pid)
            if text is not None:
                names = [name for _, _, name in spied_frames(text, process.pid)]
                assert names[-3:] == ["inner", "outer", "<module>"]
            assert stands_still(process.pid)
        finally:
            process.kill()


LYING = """#!/bin/sh
trap '' TERM
echo $$ > {pids}
exec >&-
while :; do read _ < {never}; done
"""


def test_a_reader_that_says_nothing_more_and_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, never = tmp_path / "pid", tmp_path / "never"
    os.mkfifo(never)
    program = tmp_path / "py-spy"
    program.write_text(LYING.format(pids=pids, never=never))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert asyncio.run(spy(os.getpid())) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_a_reader_is_told_nothing_of_the_agents_environment_which_ranks_could_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, program = tmp_path / "told", tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n/usr/bin/env > {told}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("MESHLOOM_REDIS_PASSWORD", "an-agents-own")
    asyncio.run(spy(os.getpid()))
    assert "PWD=" in told.read_text()
    assert "an-agents-own" not in told.read_text()


# An ELF file of 64 GiB, all holes but its first pages: a table of names that is nothing but ends of names.
SWELLING = """
import mmap, struct, sys, threading
def section(*fields):
    return struct.pack("<IIQQQQIIQQ", *fields)
size = 1 << 36
sections = section(*[0] * 10), section(1, 2, 0, 0, 0x1000, 24 * 16, 2, 0, 8, 24)
sections += section(9, 3, 0, 0, 0x4000, size - 0x4000, 0, 0, 1, 0), section(17, 3, 0, 0, 0x2000, 256, 0, 0, 1, 0)
with open(sys.argv[1], "w+b") as file:
    file.write(b"\\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8))
    file.write(struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 4, 3))
    file.write(b"".join(sections))
    file.seek(0x2000)
    file.write(b"\\0.symtab\\0.strtab\\0.shstrtab\\0")
    file.truncate(size)
    code = mmap.PROT_READ | mmap.PROT_EXEC
    mapped = mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=code)
print("ready", flush=True)
threading.Event().wait()
"""
SPYING = """
import asyncio, resource, sys
from services.worker.agent.host.stack_reader import spy
asyncio.run(spy(int(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_what_a_process_maps_takes_no_memory_of_the_agents(tmp_path: Path) -> None:
    library = tmp_path / "libpython3.11.so.1.0"
    command = [sys.executable, "-c", SWELLING, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            spying = [sys.executable, "-c", SPYING, str(process.pid)]
            said = subprocess.run(spying, capture_output=True, check=True, text=True).stdout
        finally:
            process.kill()
    assert int(said) < 400 << 10  # KiB; three GiB without a limit


def test_a_rank_that_became_a_program_of_another_user_costs_the_others_no_stacks() -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are root's alone
        folder = Path(name)
        folder.chmod(0o755)
        stacks_path(folder, 0).touch()
        child = os.fork()
        if not child:
            try:
                os.setuid(65_534)
                asyncio.run(collect(folder, {0: os.getppid()}, NOTHING_MASKED))
                os._exit(0)
            except BaseException:  # noqa: BLE001 nothing of the test may go on in the child
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SECRET = "S3cr3t-0123456789abcdef"  # noqa: S105 a test's
LOADED_FROM_A_URL = """
import faulthandler, signal, sys, threading
faulthandler.register(int(sys.argv[2]), open(sys.argv[1], "w"))
code = "def wait():\\n print('ready', flush=True)\\n threading.Event().wait()\\nwait()"
exec(compile(code, f"https://host/{sys.argv[3]}.py", "exec"))
"""


def test_a_secret_in_the_place_of_code_is_masked_when_a_gang_is_looked_into(tmp_path: Path) -> None:
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    attempt.log(0, "stderr").touch()
    seat = watched(tmp_path)._seats[0].model_copy(update={"secrets": {"HUB": SECRET}})
    told: list[Fact] = []
    command = [sys.executable, "-c", LOADED_FROM_A_URL, str(stacks_path(attempt.path, 0))]
    command += [str(STACKS_SIGNAL), SECRET]

    async def look_into(pid: int, *, is_stopped: bool) -> None:
        crew = Crew(seats={0: seat}, store=None, pids={0: pid}, pipes={}, boards={})
        gang = GangRuntime(crew, NODE, attempt, FolderFiles(tmp_path), told.append)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: stands_still(pid))
        gang.happen(DiagnosisAsked())
        while not told:  # noqa: ASYNC110 a list tells nobody
            await asyncio.sleep(0.01)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for is_stopped in (False, True):
                told.clear()
                asyncio.run(look_into(process.pid, is_stopped=is_stopped))
                (fact,) = told
                assert isinstance(fact, GangDiagnosed)
                (found,) = fact.findings.ranks
                assert SECRET not in found.model_dump_json()
                if not is_stopped or may_look_into(process.pid):
                    assert "[secret HUB]" in (found.stacks or "")
                    assert "[secret HUB].py:" in "".join(found.frames)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "length", [TEXT_KEPT, TEXT_KEPT // 2]
)  # too much, or not all is written yet
def test_half_a_secret_at_the_end_of_what_is_read_of_stacks_is_left_out(
    tmp_path: Path, length: int
) -> None:
    path = stacks_path(tmp_path, 0)
    path.touch()
    said = "x" * (length - len(SECRET) + 3) + SECRET[:-3]
    handles = signal.signal(STACKS_SIGNAL, lambda *_: path.write_text(said))
    try:
        found = asyncio.run(collect(tmp_path, {0: os.getpid()}, Mask({"HUB": SECRET})))
    finally:
        signal.signal(STACKS_SIGNAL, handles)
    assert len(found[0].text) > length // 2
    assert found[0].text.strip("x") == "[secret HUB]"


@pytest.mark.parametrize("secret", ["0123456789" * 60, "pässwört-0123"])
def test_a_secret_in_a_name_that_faulthandler_cuts_or_spells_is_masked(secret: str) -> None:
    place = f"https://host/model.py?token={secret}"
    loaded: dict[str, Any] = {"faulthandler": faulthandler}
    code = "def show(file):\n faulthandler.dump_traceback(file, all_threads=False)"
    exec(compile(code, place, "exec"), loaded)  # noqa: S102 a test's own
    with tempfile.TemporaryFile() as file:
        loaded["show"](file.fileno())
        file.seek(0)
        text = Mask({"HUB": secret}).text(file.read().decode())
    assert "?token=[secret HUB]" in text.splitlines()[1]
    assert not [part for part in ("0123", "rt-", "p\\xe4") if part in text.splitlines()[1]]


def test_of_a_process_that_is_gone_there_is_no_stack() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert asyncio.run(spy(process.pid)) is None


def test_frames_of_the_main_thread_are_told_from_those_of_others() -> None:
    text = (
        "Process 7: python\nPython v3.11.7\n\n"
        'Thread 9 (idle): "writer"\n    wait (threading.py:327)\n'
        'Thread 7 (active): "MainThread"\n    step (worker/step.py:40)\n    <module> (a b.py:2)\n'
        'Thread 8 (idle): "other"\n    run (x.py:1)\n'
    )
    assert spied_frames(text, 7) == (("worker/step.py", 40, "step"), ("a b.py", 2, "<module>"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "frame", [" (" * 11_900, " (a:1" * 4_700, f" (a:{'1' * 23_000})", ":" * 23_900]
)
def test_frames_of_any_names_and_lines_take_no_time_and_fail_nothing(frame: str) -> None:
    """All that ranks of a node can have said of them is read in the agent's loop."""
    text = f"Thread 7 (active)\n    step (a.py:1)\n    f{frame}\n    <module> (b (c).py:2)\n"
    for _ in range(200):
        assert spied_frames(text, 7) == (("a.py", 1, "step"), ("b (c).py", 2, "<module>"))


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def may_look_into(pid: int) -> bool:
    """Whether this kernel lets this process read another's memory."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb"):
            return True
    except PermissionError:
        return False
