"""What is stopped cannot answer, and is looked into from outside."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from services.worker.agent.host.stack_reader import spied_frames, spy
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


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def may_look_into(pid: int) -> bool:
    """Whether this kernel lets this process read another's memory."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb"):
            return True
    except PermissionError:
        return False
