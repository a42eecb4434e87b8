"""What the steps of a CPU rank take, by the kernel's count of a process that does nothing else."""

import mmap
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from services.worker.rank.loop.step_memory import (
    MEASURED_STEPS,
    HostMemory,
    MemoryFigures,
    step_memory,
)
from services.worker.rank.process.host_memory import count_shared_memory, limit_memory
from tests.forking import forking

T = TypeVar("T")
MIB = 1 << 20
# What Python and the kernels of these tests take for themselves.
SLACK = 6 * MIB
PIECE = 32 * 1024


def alone(course: Callable[..., T], *given: object) -> T:
    """What a course answers in a process of its own: that of the tests is full of what they left."""
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        return pool.submit(course, *given).result(timeout=120)


def begun() -> HostMemory:
    memory = HostMemory.of_this_process()
    memory.begin_model()
    return memory


def written(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


def step(memory: HostMemory, at_peak: int, copies: int = 0) -> MemoryFigures:
    memory.begin_step()
    parts = [written(1) for _ in range(at_peak)]
    del parts
    return memory.end_step(copies)


def peak(figures: MemoryFigures) -> int:
    assert figures.peak is not None
    return figures.peak


def one_step() -> MemoryFigures:
    memory = begun()
    parameters = written(16)
    figures = step(memory, at_peak=64)
    del parameters
    return figures


def test_the_figure_is_what_lived_at_the_peak_of_a_step_and_nothing_of_the_process() -> None:
    figures = alone(one_step)
    assert abs(peak(figures) - 80 * MIB) < SLACK
    assert figures.held > 16 * MIB + 100 * MIB  # Python and PyTorch


def into_holes() -> MemoryFigures:
    pieces = [bytes(PIECE) for _ in range(128 * MIB // PIECE)]
    kept = pieces[:: 2 * MIB // PIECE]
    del pieces
    figures = step(begun(), at_peak=48)
    del kept
    return figures


def test_a_heap_full_of_holes_does_not_hide_what_is_put_into_them() -> None:
    assert abs(peak(alone(into_holes)) - 48 * MIB) < SLACK


def beside_a_file(path: Path) -> MemoryFigures:
    memory = begun()
    built = written(200)
    del built
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory.begin_step()
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # all its pages are resident now
        activations = written(32)
        del activations
        return memory.end_step(0)


def test_what_was_freed_between_steps_and_what_files_back_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(48 * MIB))
    assert abs(peak(alone(beside_a_file, path)) - 32 * MIB) < SLACK


def beside_data_and_copies() -> MemoryFigures:
    memory = begun()
    with memory.apart():
        data = written(64)
    copies = written(24)
    figures = step(memory, at_peak=32, copies=copies.nbytes)
    del data
    return figures


def test_data_and_copies_for_checkpoints_do_not_count() -> None:
    figures = alone(beside_data_and_copies)
    assert abs(peak(figures) - 32 * MIB) < SLACK
    assert figures.held > 88 * MIB


def several_steps() -> list[MemoryFigures]:
    memory = begun()
    return [step(memory, at_peak=mebibytes) for mebibytes in (16, 48, 32, 96)]


def test_the_highest_of_the_first_steps_stands() -> None:
    figures = alone(several_steps)
    assert len(figures) - 1 == MEASURED_STEPS
    assert abs(peak(figures[-2]) - 48 * MIB) < SLACK
    assert peak(figures[-1]) == peak(figures[-2])


def without_a_mark() -> list[MemoryFigures]:
    with open("/proc/self/status", "rb") as status:  # noqa: PTH123 (a descriptor is what it takes)
        memory = HostMemory(status.fileno(), None)
        memory.begin_model()
        return [step(memory, at_peak=1) for _ in range(MEASURED_STEPS)]


def test_nothing_is_told_where_the_kernel_keeps_no_mark() -> None:
    figures = alone(without_a_mark)
    assert [each.peak for each in figures] == [None] * MEASURED_STEPS
    assert figures[0].held > 0


SHARER = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
memory.write(b"1" * int(sys.argv[2]))
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def shared_with_another(mebibytes: int) -> Iterator[mmap.mmap]:
    """Memory of which all pages are resident in another process and in this one."""
    nbytes, file = mebibytes * MIB, os.memfd_create("shared")
    os.ftruncate(file, nbytes)
    with (
        subprocess.Popen(
            [sys.executable, "-c", SHARER, str(file), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file],
        ) as other,
        mmap.mmap(file, nbytes) as memory,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == b"written\n"
        memory.write(b"2" * nbytes)
        yield memory
        other.communicate()
    os.close(file)


def beside_another() -> MemoryFigures:
    memory = begun()
    with shared_with_another(64):
        return step(memory, at_peak=16)


def test_of_memory_that_two_processes_share_each_counts_half() -> None:
    assert abs(peak(alone(beside_another)) - 48 * MIB) < SLACK


def limits() -> tuple[int, int]:
    limit_memory(1 << 30)
    before, _ = resource.getrlimit(resource.RLIMIT_DATA)
    with shared_with_another(64):
        count_shared_memory()
    after, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return before, after


def test_a_limit_counts_the_part_of_this_process_of_what_it_shares() -> None:
    before, after = alone(limits)
    assert abs(before - after - 32 * MIB) < SLACK


def on_a_device_in_pieces() -> tuple[MemoryFigures, MemoryFigures]:
    memory = step_memory(torch.device("cuda"))
    memory.begin_model()
    pieces = [torch.ones(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    whole = memory.end_step(0)
    # Every other piece is free: twice as large a tensor finds no room in any, so that more is taken of
    # the device, while the most that was given out stays what it was.
    del pieces[::2]
    larger = [torch.ones(24 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    in_pieces = memory.end_step(0)
    del pieces, larger
    return whole, in_pieces


@pytest.mark.gpu
def test_fragments_of_a_devices_allocator_are_counted_apart_from_its_peak() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        whole, in_pieces = pool.submit(on_a_device_in_pieces).result(timeout=120)
    assert whole.peak == in_pieces.peak == 128 * MIB
    assert whole.fragments is not None
    assert in_pieces.fragments is not None
    assert in_pieces.fragments >= whole.fragments + 40 * MIB


def test_a_host_has_no_fragments_that_an_allocator_counts() -> None:
    assert alone(one_step).fragments is None
