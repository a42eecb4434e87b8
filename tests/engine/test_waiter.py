"""The thread that waits for works without time-outs."""

import subprocess
import sys

ENDING_WHILE_IT_WAITS = """
import atexit
import threading
from datetime import timedelta

# What is registered last runs first.
atexit.register(lambda: print("still waits:", any(t.name == "fsdp_core waits" for t in threading.enumerate())))

import torch.distributed as dist

from fsdp_core.comm.waiter import TimedWork, Waiter

ends = threading.Event()


class Stuck(dist.Work):
    def wait(self, timeout=None):
        ends.wait()
        return True


waiter = Waiter()
try:
    TimedWork(Stuck(), waiter).wait(timedelta(0))
except RuntimeError as error:
    print(error)
atexit.register(ends.set)
"""


def test_a_process_ends_after_its_threads() -> None:
    """One that comes back from C++ while Python is being taken down makes C++ abort the process."""
    run = subprocess.run(
        [sys.executable, "-c", ENDING_WHILE_IT_WAITS], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        "The collective has not ended after 0:00:00.",
        "still waits: False",
    ]
