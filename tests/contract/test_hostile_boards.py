"""A board that a rank filled with whatever it liked: its reader answers or raises one error."""

import math
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.messages.board import (
    BOARD_BYTES,
    MAX_GROUPS,
    MAX_STEP,
    BoardError,
    BoardReader,
    BoardSnapshot,
    BoardStep,
    BoardWriter,
)
from services.contract.words.states import RankPhase

SLOT_A, RING = 64, 4096
SNAPSHOT = struct.Struct("<Qqqqqqqqddd" + "qq" * MAX_GROUPS)
STEP = struct.Struct("<qdddddqqq")
INT64 = st.integers(-(2**63), 2**63 - 1)


def checked(record: bytes) -> bytes:
    return record + struct.pack("<Q", zlib.crc32(record))


def put(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def snapshot(
    *, phase: int = 6, unit: int = -1, step: int = 3, step_s: float = 0.0, sequence: int = 0
) -> bytes:
    """A whole one that is newer than any other."""
    fields = [2**63, 1, phase, unit, step, -1, -1, -(2**63), 0.0, 0.0, step_s]
    return checked(SNAPSHOT.pack(*fields, *[0] * (2 * MAX_GROUPS - 1), sequence))


def read_all(reader: BoardReader) -> list[str]:
    """What every question is answered with: nothing but its own kind of answer, or BoardError."""
    errors = []
    for question in (
        reader.read,
        lambda: reader.steps_after(0),
        lambda: [reader.arrivals(place) for place in range(MAX_GROUPS)],
        reader.pulse_ns,
    ):
        try:
            question()
        except BoardError as error:
            errors.append(str(error))
    return errors


@pytest.fixture
def board(tmp_path: Path) -> Path:
    path = tmp_path / "board"
    writer = BoardWriter.create(path, fence=1)
    writer.finish_step(BoardStep(1, 1.0, 1.0, 1.0, 1.0, 1.0, memory_bytes=1), now_ns=1)
    return path


@pytest.mark.parametrize(
    ("offset", "content", "words"),
    [
        (SLOT_A, snapshot(phase=99), "wrote phase 99 to its board, which is none of 0 to 16"),
        (SLOT_A, snapshot(unit=-7), "wrote unit -7 to its board"),
        (SLOT_A, snapshot(step=-1), "wrote step -1 to its board"),
        (SLOT_A, snapshot(step=2**60), f"wrote step {2**60} to its board"),
        (SLOT_A, snapshot(step_s=-5.0), "wrote a step of -5.0 s to its board"),
        (SLOT_A, snapshot(step_s=1e308), "wrote a step of 1e+308 s to its board"),
        (SLOT_A, snapshot(sequence=-1), "wrote collective -1 to its board"),
        (RING, checked(STEP.pack(2**60, *[0.0] * 5, 0, 0, 0)), f"wrote step {2**60} to its board"),
        (
            RING,
            checked(STEP.pack(5, *[0.0] * 4, -5.0, 0, 0, 0)),
            "wrote a step of -5.0 s to its board",
        ),
        (
            RING,
            checked(STEP.pack(5, *[0.0] * 4, 1e308, 0, 0, 0)),
            "wrote a step of 1e+308 s to its board",
        ),
        (
            RING,
            checked(STEP.pack(5, *[0.0] * 4, math.inf, 0, 0, 0)),
            "wrote a step of inf s to its board",
        ),
    ],
)
def test_a_whole_record_that_says_what_cannot_be_is_an_error_that_says_so(
    board: Path, offset: int, content: bytes, words: str
) -> None:
    reader = BoardReader.open(board)
    put(board, offset, content)
    (error,) = read_all(reader)
    assert words in error
    reader.close()


@pytest.mark.parametrize("size", [0, 1, 4096, BOARD_BYTES - 1, BOARD_BYTES + 1, 1 << 40])
def test_a_board_that_was_cut_or_grown_is_an_error_and_no_signal(board: Path, size: int) -> None:
    reader = BoardReader.open(board)
    os.truncate(board, size)
    errors = read_all(reader)
    assert len(errors) == 4
    assert all(f"made its board {size} bytes long" in error for error in errors)
    with pytest.raises(BoardError):
        BoardReader.open(board)
    reader.close()


def test_a_board_that_was_replaced_is_read_no_further_and_no_other_thing_is_opened(
    board: Path, tmp_path: Path
) -> None:
    reader = BoardReader.open(board)
    board.unlink()
    os.mkfifo(board)  # to open one would wait for a writer
    assert read_all(reader) == []
    with pytest.raises(OSError, match=f"not a plain file: '{board}'"):
        BoardReader.open(board)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=f"symbolic links: '{link}'"):
        BoardReader.open(link)
    reader.close()


@given(
    pieces=st.lists(
        st.tuples(st.integers(16, BOARD_BYTES - 1), st.binary(max_size=300)), max_size=20
    ),
    fields=st.lists(INT64, min_size=7, max_size=7),
    figures=st.lists(st.floats(), min_size=3, max_size=3),
    counters=st.lists(INT64, min_size=2 * MAX_GROUPS, max_size=2 * MAX_GROUPS),
    steps=st.lists(st.tuples(INT64, st.floats()), max_size=10),
)
def test_whatever_bytes_a_board_holds_they_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[int, bytes]],
    fields: list[int],
    figures: list[float],
    counters: list[int],
    steps: list[tuple[int, float]],
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "board"
    BoardWriter.create(path, fence=1)
    reader = BoardReader.open(path)
    for offset, content in pieces:
        put(path, offset, content[: BOARD_BYTES - offset])
    put(path, SLOT_A, checked(SNAPSHOT.pack(2**63, *fields, *figures, *counters)))
    for place, (number, figure) in enumerate(steps):
        put(
            path,
            RING + 80 * place,
            checked(STEP.pack(number, *[figure] * 5, 0, -(2**63), 2**63 - 1)),
        )
    read_all(reader)
    try:
        seen = reader.read()
    except BoardError:
        seen = None
    if seen is not None:
        assert isinstance(seen, BoardSnapshot)
        assert seen.phase in RankPhase
        assert 0 <= seen.step <= MAX_STEP
    reader.close()
