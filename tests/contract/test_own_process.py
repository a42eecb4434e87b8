"""What a process of ours prints never ends it, and what it knows stays its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.contract.system.own_process import LossyOutput
from services.local.settings import child_environment

# Root has CAP_SYS_PTRACE, from which nothing can be hidden.
DROP_CAPABILITIES = """
import ctypes, struct
assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
"""
HOLDER = """
import signal
from services.contract.system.own_process import set_up_process
set_up_process(holds_secrets={hidden})
print("ready")
signal.pause()
"""
READER = """
import pathlib, sys
print("of the operator" in pathlib.Path("/proc", sys.argv[1], "environ").read_text())
"""

KEEPER = """
from pathlib import Path
from services.contract.system.own_process import give_large_blocks_back
give_large_blocks_back()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
large = bytearray(b"x") * (20 << 20)  # what is freed raises the C library's threshold to its size
del large
answers, kept = [], []
for _ in range(10):
    answers.append(bytearray(b"x") * (10 << 20))
    kept.append(bytes(100_000))
del answers
print(resident() - before)
"""


def test_memory_of_large_answers_is_the_systems_again_once_they_are_gone() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KEEPER], env=child_environment(), capture_output=True, check=True
    )
    assert int(ended.stdout) < 20 << 20


@pytest.mark.parametrize("hidden", ["False", "True"])
def test_the_environment_of_a_process_that_holds_secrets_cannot_be_read_by_its_own_user(
    hidden: str,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DROP_CAPABILITIES + HOLDER.format(hidden=hidden)],
        env=child_environment(HELD="of the operator"),
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        reader = [sys.executable, "-c", DROP_CAPABILITIES + READER, str(holder.pid)]
        read = subprocess.run(reader, capture_output=True, text=True, check=False)
        holder.kill()
    assert ("PermissionError" in read.stderr, read.stdout == "True\n") == (
        hidden == "True",
        hidden == "False",
    )


def test_output_that_a_full_disk_refuses_is_counted_and_told_once_there_is_room(
    tmp_path: Path,
) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = LossyOutput.text(descriptor)
    output.write("lost\n")
    print("lost, too", file=output, flush=True)
    with (tmp_path / "log").open("wb") as disk:
        os.dup2(disk.fileno(), descriptor)
    output.write("kept\n")
    output.write("kept, too\n")
    os.close(descriptor)
    told = "\n… 15 bytes of this output are lost: No space left on device\n"
    assert (tmp_path / "log").read_text() == told + "kept\nkept, too\n"
