"""What the kernel says of a process may be what the process made of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from services.contract.messages.warm_channel import NODE_MARK
from services.worker.agent.host import sentinel
from services.worker.agent.host.processes import (
    _waiting,
    carries,
    is_dying,
    kill_tracers,
    marked,
    process_state,
    sweep_sessions,
)
from tests.agent.conftest import is_gone
from tests.disk import file_that_does_not_answer
from tests.waiting import until

PRELUDE = """
import ctypes, os, signal, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def ready():
    print(os.getpid(), flush=True)
    threading.Event().wait()
"""
# Neither a name that is text, nor one word.
NAMED = r"""
libc.prctl(15, b"\xff) Z \xfe", 0, 0, 0)
ready()
"""
# A map of a GiB that takes no memory until somebody reads it is said to be its environment.
LARGE = """
size = 1 << 30
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
start = libc.mmap(None, ctypes.c_size_t(size), 1, 0x4022, -1, 0)
fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
code, code_end, stack, data, data_end, brk, args, args_end = (
    int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 48, 49)
)
places = code, code_end, data, data_end, brk, libc.sbrk(0), stack, args, args_end
asked = struct.pack("<12QII", *places, start, start + size, 0, 0, 0xFFFFFFFF)
if libc.prctl(35, 14, asked, len(asked), 0):
    sys.exit(os.strerror(ctypes.get_errno()))
ready()
"""
# A child in a session of its own traces the second thread of its parent, which then ends.
TRACED = """
libc.prctl(0x59616D61, -1, 0, 0, 0)
threads = []
def wait():
    threads.append(threading.get_native_id())
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
while not threads:
    os.sched_yield()
if os.fork() == 0:
    os.setsid()
    if libc.ptrace(0x4206, threads[0], 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
    ready()
threading.Event().wait()
"""
# One thread reads, by way of the process's memory, what a server is to bring; a second one wants to change that
# memory, and all who come later wait behind it.
HELD = """
libc.mmap.restype = ctypes.c_void_p
def hold():
    file = os.open(sys.stdin.readline().rstrip(), os.O_RDONLY)
    size = os.fstat(file).st_size
    place = libc.mmap(None, ctypes.c_size_t(size), 1, 1, file, ctypes.c_long(0))
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    threading.Thread(target=os.pread, args=(memory, 1, place), daemon=True).start()
    sys.stdin.readline()
    libc.mmap(None, ctypes.c_size_t(4096), 1, 0x22, -1, ctypes.c_long(0))
threading.Thread(target=hold, daemon=True).start()
ready()
"""


@contextmanager
def running(program: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A process, and the number of the one that says that it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        said = int(process.stdout.readline())
        try:
            yield process, said
        finally:
            for pid in (said, process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()


def test_a_process_whose_name_is_no_text_is_looked_at_as_any_other() -> None:
    with running(NAMED) as (process, _):
        until(lambda: process_state(process.pid) == "S")
        assert not is_dying(process.pid)
        process.kill()
        until(lambda: is_dying(process.pid))


def test_of_a_process_that_says_its_environment_is_large_no_more_is_read_than_there_can_be() -> (
    None
):
    with running(LARGE):
        tracemalloc.start()
        try:
            assert marked("no mark at all") == []
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 64 << 20


def test_a_process_that_holds_its_memory_keeps_no_other_from_being_found(tmp_path: Path) -> None:
    """Where a server or a driver is away, whoever reads that process's environment waits as long."""
    mark, found = f"loom-1-{tmp_path.name}", list[list[int]]()
    with running(HELD) as (held, _), file_that_does_not_answer(tmp_path / "file") as asked:
        tell(held, f"{tmp_path / 'file'}\n")
        assert asked.wait(20)
        tell(held, "\n")
        until(lambda: states(held.pid).count("D") == 1)
        with subprocess.Popen(
            ["sleep", "60"], env={NODE_MARK: mark}, start_new_session=True
        ) as left:
            sessions = {os.getsid(held.pid), left.pid}
            until(lambda: Path(f"/proc/{left.pid}/environ").read_bytes() != b"")

            def look() -> None:
                found.append([process.pid for process in marked(mark)])
                found.append(sweep_sessions(mark, sessions))

            looking = threading.Thread(target=look, daemon=True)
            looking.start()
            looking.join(20)
            left.kill()
        assert found == [[left.pid], [left.pid]]
        assert states(held.pid).count("D") == 1
    until(lambda: marked("no mark at all") == [] and not _waiting)


def test_a_process_that_answers_late_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"loom-1-{tmp_path.name}"
    monkeypatch.setenv(NODE_MARK, mark)
    monkeypatch.setattr(sentinel, "_QUIET_LOOKS", 1)
    with running(HELD) as (held, _):
        with file_that_does_not_answer(tmp_path / "file") as asked:
            tell(held, f"{tmp_path / 'file'}\n")
            assert asked.wait(20)
            tell(held, "\n")
            until(lambda: states(held.pid).count("D") == 1)
            ending = threading.Thread(target=sentinel.end_all, args=(mark,), daemon=True)
            ending.start()
            until(lambda: held.pid in _waiting)
        until(lambda: not ending.is_alive())
        assert is_gone(held.pid)


def tell(process: "subprocess.Popen[bytes]", words: str) -> None:
    assert process.stdin is not None
    process.stdin.write(words.encode())
    process.stdin.flush()


def states(pid: int) -> list[str]:
    """Of all threads of a process."""
    return [process_state(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


@pytest.mark.parametrize(
    ("before", "behind", "is_carried"),
    [
        (b"", b"", True),
        (b"A=1\0", b"\0B=2", True),
        (b"A=1\0", b"/another life", True),
        (b"A=", b"", False),
        (b"", b"-2", False),
        (b"A=MESHLOOM_NODE_MARK=loom-1\0", b"\0", True),
    ],
)
def test_a_mark_is_found_where_it_stands_for_itself(
    before: bytes, behind: bytes, *, is_carried: bool
) -> None:
    assert carries(before + b"MESHLOOM_NODE_MARK=loom-1" + behind, "loom-1") is is_carried


def test_an_environment_of_megabytes_keeps_no_other_thread_of_the_agent_waiting() -> None:
    """No other thread runs while it is searched; a rank can start any number of such processes."""
    largest = bytes(8 << 20)

    def searched_s() -> float:
        began = time.perf_counter()
        assert not carries(largest, "loom-1")
        return time.perf_counter() - began

    assert min(searched_s() for _ in range(5)) < 0.03


def test_a_dead_process_is_reaped_once_whoever_traces_a_thread_of_it_is_killed() -> None:
    with running(TRACED) as (process, tracer):
        process.send_signal(signal.SIGTERM)
        until(lambda: is_dying(process.pid))
        assert process.poll() is None
        assert kill_tracers(process.pid) == [tracer]
        assert process.wait(60) == -signal.SIGTERM
        until(lambda: is_gone(tracer))


def test_nobody_traces_most_processes() -> None:
    with running("ready()") as (process, _):
        assert kill_tracers(process.pid) == []
        assert kill_tracers(1 << 30) == []


# A process and its child, each of which brings the other back where it sees it die.
BRINGING_BACK = """
from services.worker.rank.process.warm import children, end_strays
libc.prctl(36, 1, 0, 0, 0)
reading, writing = os.pipe()
import time
over_at = time.monotonic() + 10
def worker(parent):
    libc.prctl(1, signal.SIGUSR1, 0, 0, 0)
    os.write(writing, b"w")
    while time.monotonic() < over_at:
        if os.getppid() != parent or signal.sigtimedwait({signal.SIGUSR1}, 0.01):
            supervisor()
def supervisor():
    os.setsid()
    os.write(writing, b"s")
    own = os.getpid()
    while time.monotonic() < over_at:
        if os.fork() == 0:
            worker(own)
            os._exit(0)
        os.wait()
    os._exit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
if os.fork() == 0:
    supervisor()
started = os.read(reading, 1) + os.read(reading, 1)
end_strays(())
while children():
    os.waitpid(-1, 0)
os.set_blocking(reading, False)
try:
    started += os.read(reading, 100)
except BlockingIOError:
    pass
print(started.decode(), flush=True)
"""


def test_of_processes_that_bring_each_other_back_none_outlives_the_one_that_left_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + BRINGING_BACK],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sw\n"


# A probe that ends and leaves a hundred processes.
LEAVING_MANY = """
import signal
from services.worker.rank.process.probe_program import _see_to_its_end
class Agent:
    def sendall(self, said):
        print(opened, flush=True)
opened = 0
def count(event, args):
    global opened
    opened += event == "open"
libc.prctl(36, 1, 0, 0, 0)
child = os.fork()
if child == 0:
    for _ in range(100):
        if os.fork() == 0:
            signal.pause()
    os._exit(0)
sys.addaudithook(count)
_see_to_its_end(child, Agent())
"""


def test_a_probe_that_leaves_many_processes_is_over_after_a_few_looks_at_each() -> None:
    command = [sys.executable, "-c", PRELUDE + LEAVING_MANY]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert 100 < int(said) < 2_000  # a hundred for each without care
