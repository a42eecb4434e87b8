"""The board: whole records only, whatever a kill or a stop tore."""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.messages.board import (
    ARRIVALS_KEPT,
    BOARD_BYTES,
    MAX_GROUPS,
    BoardReader,
    BoardSnapshot,
    BoardStep,
    BoardWriter,
)
from services.contract.words.states import RankPhase

SLOT_A, SLOT_B, RING, RING_ENTRY, RING_LENGTH = 64, 1088, 4096, 80, 256
ARRIVALS = 20_480


class Board:
    """A writer, a reader, and a hand that tears."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = BoardWriter.create(path, fence=3)
        self.reader = BoardReader.open(path)

    def tear(self, offset: int, content: bytes) -> None:
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), BOARD_BYTES) as memory:
            memory[offset : offset + len(content)] = content

    def at_step(self, step: int) -> BoardSnapshot:
        snapshot = replace(self.writer.snapshot, step=step, stored_ns=step)
        self.writer.store(snapshot)
        return snapshot

    def finish(self, step: int) -> BoardStep:
        record = BoardStep(step, 1 / step, 2.0, 1e-3 / 3, 10.0, 0.5, memory_bytes=7, ended_ms=step)
        self.writer.finish_step(record, peak_bytes=5, now_ns=step)
        return record


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "board")
    yield board
    board.reader.close()


def test_a_board_has_all_of_its_memory_from_the_beginning(tmp_path: Path) -> None:
    """On a tmpfs that fills up later, no store into it can fail."""
    BoardWriter.create(tmp_path / "board", fence=1)
    assert (tmp_path / "board").stat().st_blocks * 512 >= BOARD_BYTES


def test_an_empty_board_has_no_snapshot_and_no_step(board: Board) -> None:
    assert board.reader.read() is None
    assert board.reader.steps_after(-1) == []


def test_the_wait_for_data_is_a_figure_only_where_it_was_measured(board: Board) -> None:
    board.finish(1)  # as by a rank that knows no such figure: zero bits are in its place
    measured = BoardStep(2, 1.0, 2.0, 1e-3, 10.0, 0.5, data_wait_s=0.125)
    board.writer.finish_step(measured, peak_bytes=5, now_ns=2)
    first, second = board.reader.steps_after(0)
    assert math.isnan(first.data_wait_s)
    assert second == measured == board.reader.step(2)
    assert board.reader.step(3) is None
    assert board.reader.step(2 + RING_LENGTH) is None


def test_what_an_allocator_holds_over_its_peak_is_a_figure_only_where_there_is_one(
    board: Board,
) -> None:
    record = board.finish(1)  # as on a CPU, and by ranks that know no such figure
    assert board.reader.fragments_bytes() is None
    for written, read in ((1 << 30, 1 << 30), (-1, None)):
        board.writer.finish_step(record, peak_bytes=5, fragments_bytes=written, now_ns=2)
        assert board.reader.fragments_bytes() == read


def test_a_snapshot_is_read_back_exactly(board: Board) -> None:
    snapshot = BoardSnapshot(
        fence=3,
        phase=RankPhase.POST_BACKWARD,
        unit_index=5,
        step=9,
        memory_bytes=1 << 40,
        peak_bytes=1 << 39,
        stored_ns=123,
        loss=0.1 + 0.2,
        tokens_per_s=1 / 3,
        step_time_s=0.5,
        issued=tuple(range(MAX_GROUPS)),
        completed=tuple(range(1, MAX_GROUPS + 1)),
    )
    board.writer.store(snapshot)
    assert board.reader.read() == snapshot


@pytest.mark.parametrize(("newest", "slot"), [(2, SLOT_A), (3, SLOT_B)])
@pytest.mark.parametrize("where", [0, 8, 40, 100])
def test_the_other_snapshot_is_read_when_the_newest_is_torn(
    board: Board, newest: int, slot: int, where: int
) -> None:
    for step in range(1, newest + 1):
        board.at_step(step)
    board.tear(slot + where, b"\xee" * 8)
    snapshot = board.reader.read()
    assert snapshot is not None
    assert snapshot.step == newest - 1


def test_two_torn_snapshots_are_no_snapshot(board: Board) -> None:
    for step in (1, 2):
        board.at_step(step)
    for slot in (SLOT_A, SLOT_B):
        board.tear(slot + 16, struct.pack("<q", 77))
    assert board.reader.read() is None


def test_storing_goes_on_after_a_torn_snapshot(board: Board) -> None:
    board.at_step(1)
    board.tear(SLOT_B, b"\xee" * 200)
    for step in (2, 3):
        board.at_step(step)
    snapshot = board.reader.read()
    assert snapshot is not None
    assert snapshot.step == 3


@given(st.integers(1, 600), st.integers(0, 600))
def test_the_ring_holds_the_last_steps_in_order(
    tmp_path_factory: pytest.TempPathFactory, last: int, after: int
) -> None:
    board = Board(tmp_path_factory.mktemp("board") / "board")
    written = [board.finish(step) for step in range(1, last + 1)]
    held = written[-RING_LENGTH:]
    assert board.reader.steps_after(after) == [step for step in held if step.step > after]
    board.reader.close()


def test_a_torn_step_is_left_out_and_the_others_are_read(board: Board) -> None:
    for step in range(1, 6):
        board.finish(step)
    board.tear(RING + 3 * RING_ENTRY + 8, b"\xee" * 8)
    assert [step.step for step in board.reader.steps_after(0)] == [1, 2, 4, 5]


def test_a_finished_step_is_in_the_snapshot_too(board: Board) -> None:
    board.finish(4)
    snapshot = board.reader.read()
    assert snapshot is not None
    assert (snapshot.step, snapshot.loss) == (4, 0.25)
    assert (snapshot.memory_bytes, snapshot.peak_bytes) == (7, 5)


def test_a_board_can_be_read_after_its_writer_is_gone(board: Board) -> None:
    board.finish(4)
    del board.writer
    again = BoardReader.open(board.path)
    assert [step.step for step in again.steps_after(0)] == [4]
    again.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(BOARD_BYTES)])
def test_what_is_no_board_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 of mmap or of ours: the caller treats both alike
        BoardReader.open(path)


def test_the_last_arrivals_of_each_group_are_kept_with_their_moments(board: Board) -> None:
    for number in range(1, 3 * ARRIVALS_KEPT):
        board.writer.arrive(0, number, 1000 + number)
    board.writer.arrive(MAX_GROUPS - 1, 5, 77)
    kept = board.reader.arrivals(0)
    assert kept == {n: 1000 + n for n in range(2 * ARRIVALS_KEPT, 3 * ARRIVALS_KEPT)}
    assert board.reader.arrivals(MAX_GROUPS - 1) == {5: 77}
    assert board.reader.arrivals(1) == {}


@given(torn=st.integers(min_value=1, max_value=23), number=st.integers(1, 2**62))
def test_a_torn_arrival_is_none(
    tmp_path_factory: pytest.TempPathFactory, torn: int, number: int
) -> None:
    board = Board(tmp_path_factory.mktemp("torn") / "board")
    board.writer.arrive(0, number, 5)
    whole = struct.pack("<qqq", number + 192, 6, (number + 192) ^ 6)
    offset = ARRIVALS + number % ARRIVALS_KEPT * 24
    board.tear(offset, whole[:torn])
    found = board.reader.arrivals(0)
    assert set(found.items()) <= {(number, 5), (number + 192, 6)}
    board.reader.close()


def test_the_pulse_is_told_apart_from_the_snapshots(board: Board) -> None:
    assert board.reader.pulse_ns() is None
    board.writer.beat(123)
    board.at_step(2)
    assert board.reader.pulse_ns() == 123
    seen = board.reader.read()
    assert seen is not None
    assert seen.step == 2
