"""What the steps of a CPU rank take, by the kernel's count of this very process."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.worker.rank.step_memory import MEASURED_STEPS, HostMemory, MemoryFigures

MIB = 1 << 20
# What Python and the kernels of these tests take for themselves.
SLACK = 6 * MIB


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory.of_this_process()
    memory.begin_model()
    yield memory
    for _ in range(MEASURED_STEPS):  # the C library allocates as usual again
        memory.end_step(0)


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


def test_the_figure_is_what_lived_at_the_peak_of_a_step_and_nothing_of_the_process(
    memory: HostMemory,
) -> None:
    parameters = written(16)
    figures = step(memory, at_peak=64)
    assert abs(peak(figures) - 80 * MIB) < SLACK
    assert figures.held > parameters.nbytes + 100 * MIB  # Python and PyTorch


def test_what_was_freed_between_steps_and_what_files_back_does_not_count(
    memory: HostMemory, tmp_path: Path
) -> None:
    built = written(200)
    del built
    path = tmp_path / "library"
    path.write_bytes(bytes(48 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory.begin_step()
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # all its pages are resident now
        activations = written(32)
        del activations
        figures = memory.end_step(0)
    assert abs(peak(figures) - 32 * MIB) < SLACK


def test_data_and_copies_for_checkpoints_do_not_count(memory: HostMemory) -> None:
    with memory.apart():
        data = written(64)
    copies = written(24)
    figures = step(memory, at_peak=32, copies=copies.nbytes)
    assert abs(peak(figures) - 32 * MIB) < SLACK
    assert data.nbytes + copies.nbytes < figures.held


def test_the_highest_of_the_first_steps_stands(memory: HostMemory) -> None:
    figures = [step(memory, at_peak=mebibytes) for mebibytes in (16, 48, 32)]
    assert abs(peak(figures[-1]) - 48 * MIB) < SLACK
    assert peak(step(memory, at_peak=96)) == peak(figures[-1])


def test_nothing_is_told_where_the_kernel_keeps_no_mark() -> None:
    with open("/proc/self/status", "rb") as status:  # noqa: PTH123 (a descriptor is what it takes)
        memory = HostMemory(status.fileno(), None)
        memory.begin_model()
        figures = [step(memory, at_peak=1) for _ in range(MEASURED_STEPS)]
    assert [each.peak for each in figures] == [None] * MEASURED_STEPS
    assert figures[0].held > 0
