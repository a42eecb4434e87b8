"""Files that ranks write become log lines: each once, bounded, readable."""

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.system.mask import Mask
from services.worker.agent.telemetry import log_tail
from services.worker.agent.telemetry.log_tail import (
    BACKLOG_BYTES,
    LINE_CHARACTERS,
    LogTail,
    level_of,
)

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def texts(tail: LogTail, limit: int = 1_000, *, last: bool = False) -> list[str]:
    return [line.text for line in tail.read(limit, last=last)]


def drained(tail: LogTail, limit: int = 1_000) -> list[str]:
    found: list[str] = []
    while not tail.at_end():
        found += texts(tail, limit, last=True)
    return found


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_a_line_is_read_once_and_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert texts(tail) == []
    append(path, b"one\ntw")
    assert texts(tail) == ["one"]
    append(path, b"o\n\n")
    assert texts(tail) == ["two", ""]
    append(path, b"end")
    assert texts(tail) == []
    assert texts(tail, last=True) == ["end"]
    assert tail.at_end()


@given(st.lists(st.text(alphabet="aé—\t b", max_size=30), max_size=40), st.integers(1, 7))
def test_any_lines_are_read_whole_whatever_the_limit(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], limit: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    append(path, "".join(f"{line}\n" for line in lines).encode())
    assert drained(LogTail(path), limit) == lines


def test_a_long_line_is_cut_with_a_mark_and_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * 700_000 + b"\nafter\n")
    cut, after = drained(LogTail(path))
    assert cut.startswith("x" * LINE_CHARACTERS + " … (")
    assert cut.endswith("characters cut)")
    assert after == "after"


def test_a_flood_is_passed_over_with_a_count_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    count = 4 * BACKLOG_BYTES // 10
    append(path, b"".join(b"%08d\n" % number for number in range(count)))
    dropped, *kept = drained(LogTail(path))
    assert dropped.endswith("dropped here: the rank writes faster than its log is followed")
    assert int(dropped.split()[1]) + len(kept) == count
    assert kept[-1] == f"{count - 1:08d}"


def read_so_far() -> int:
    """How many bytes this process has read of anything."""
    told = Path("/proc/self/io").read_text()
    return int(told.split("rchar:")[1].split()[0])


def test_what_a_rank_makes_long_at_no_cost_is_not_read_to_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    os.truncate(path, 60 << 20)
    append(path, b"\nwhole\n")
    before = read_so_far()
    dropped, *_, last = drained(LogTail(path))
    assert read_so_far() - before < 8 << 20
    assert "bytes dropped here" in dropped
    assert last == "whole"


def test_nothing_is_shown_of_a_line_whose_beginning_was_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * (4 * BACKLOG_BYTES) + b"half of it\nwhole\n")
    dropped, *kept = drained(LogTail(path))
    assert "dropped here" in dropped
    assert kept == ["whole"]


def test_nothing_is_kept_of_an_unread_line_whose_beginning_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 2 * BACKLOG_BYTES)
    path = tmp_path / "log"
    append(path, b"y" * (3 * BACKLOG_BYTES) + b"half of it\nwhole\n")
    tail = LogTail(path)
    tail.cut_back()
    words, *kept = drained(tail)
    assert words.startswith("…")
    assert kept == ["whole"]


@pytest.mark.parametrize("comes", ["before it is cut", "afterwards"])
@pytest.mark.parametrize("is_read", [True, False])
def test_no_half_of_a_secret_is_shown_of_a_long_line_within_which_the_file_is_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str, *, is_read: bool
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 1)
    path = tmp_path / "log"
    tail = LogTail(path, Mask({"key": "0123456789abcdef"}))
    append(path, b"x" * ((1 << 16) if is_read else 2 * BACKLOG_BYTES) + b"0123456789")
    shown = texts(tail) if is_read else []
    half = b"abcdef\nafter\n"
    if comes == "before it is cut":
        append(path, half)
    tail.cut_back()
    if comes == "afterwards":
        append(path, half)
    words, *rest = texts(tail)
    assert words.startswith("…")
    assert rest == ["after"]
    assert not any("0123456789" in text for text in shown)


def test_no_line_is_hidden_behind_a_cut_one_that_was_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    append(path, b"x" * (1 << 16))
    drained(tail)
    with monkeypatch.context() as patched:
        patched.setattr(log_tail, "FILE_BYTES", 1)
        tail.cut_back()
    append(path, b"the rest\n" + b"".join(b"%07d\n" % n for n in range(BACKLOG_BYTES // 4)))
    words, first, second, *_ = drained(tail)
    assert words.startswith("…")
    assert int(second) == int(first) + 1
    assert int(words.split()[1]) == int(first) + 2  # the words at its beginning, and the cut line


def test_no_half_of_a_secret_is_shown_of_a_file_that_is_started_over_twice_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 1)
    path = tmp_path / "log"
    tail = LogTail(path, Mask({"key": "0123456789abcdef"}))
    append(path, b"x" * (1 << 16) + b"0123456789")
    drained(tail)
    tail.cut_back()
    append(path, b"abc")
    tail.cut_back()
    append(path, b"def\nafter\n")
    first, second, *rest = drained(tail)
    assert first.startswith("…")
    assert second.startswith("…")
    assert rest == ["after"]


@pytest.mark.parametrize("call", ["fstat", "ftruncate"])
def test_no_half_of_a_secret_is_shown_of_a_rank_that_writes_while_its_file_is_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A program in C writes blocks of its buffer, which begin and end anywhere in a line."""
    path = tmp_path / "log"
    path.touch()
    tail = LogTail(path, Mask({"key": "0123456789abcdef"}))
    blocks = iter([b"abcdef\nthe key is 0123456789", b"abcdef\nand lost is 0123456789"])
    append(path, b"a whole line\nthe key is 0123456789")
    called = getattr(os, call)

    def and_the_rank_writes(descriptor: int, *arguments: int) -> object:
        result = called(descriptor, *arguments)
        append(path, next(blocks, b""))
        return result

    monkeypatch.setattr(log_tail, "FILE_BYTES", 1)
    monkeypatch.setattr(os, call, and_the_rank_writes)
    tail.cut_back()
    monkeypatch.undo()
    append(path, b"abcdef\nafter\n")
    words, first, *rest, last = texts(tail)
    assert words.startswith("…")
    assert first == "a whole line"
    assert {*rest} <= {"the key is [secret key]"}
    assert last == "after"


def test_no_half_of_a_secret_is_shown_of_the_last_line_of_a_rank_that_was_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    append(path, b"before\nthe key is 0123456789")
    tail = LogTail(path, Mask({"key": "0123456789abcdef"}))
    lines = [line.text for line in tail.read(10, last=True)]
    assert lines == ["before", "the key is [secret key]"]


def test_no_half_of_a_secret_is_shown_where_the_words_of_a_crash_follow_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"the key is 01234567Fatal Python error: Segmentation fault\n")
    append(path, b"and then 0123\xc3Thread 0x00007f (most recent call first):\n")
    tail = LogTail(path, Mask({"key": "0123456789", "other": "0123ä and more"}))
    assert [line.text for line in tail.read(10)] == [
        "the key is [secret key]Fatal Python error: Segmentation fault",
        "and then [secret other]Thread 0x00007f (most recent call first):",
    ]


@pytest.mark.parametrize("left", range(1, 5))
def test_no_half_of_a_secret_is_shown_of_a_line_that_is_cut_within_a_letter(
    tmp_path: Path, left: int
) -> None:
    path = tmp_path / "log"
    append(path, "the key is naïve € 𝄞".encode()[:-left])
    tail = LogTail(path, Mask({"key": "naïve € 𝄞 and more"}))
    assert [line.text for line in tail.read(10, last=True)] == ["the key is [secret key]"]


def test_no_half_of_a_secret_is_shown_of_a_long_line_that_overwrites_itself(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"\r 98%|#" * 10_000 + b"\r 99%|##\rthe key is 0123456789")
    tail = LogTail(path, Mask({"key": "0123456789abcdef"}))
    shown = texts(tail)
    append(path, b"abcdef\nafter\n")
    assert [*shown, *texts(tail)] == [" 99%|##", "after"]


def test_no_half_of_a_secret_is_shown_of_a_long_line_of_terminal_codes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"red " + b"\x1b[31m" * 16_000 + b"the key, the key is 0123456789")
    tail = LogTail(path, Mask({"key": "0123456789abcdef", "longer": "x" * 18}))
    shown = texts(tail)
    append(path, b"abcdef\nafter\n")
    first, second = [*shown, *texts(tail)]
    assert first.startswith("red the k")
    assert "0" not in first
    assert second == "after"


def test_a_terminals_signs_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"  1%|#\r 50%|##\r100%|####\r\n\x1b[31mred\x1b[0m \xff\n")
    assert texts(LogTail(path)) == ["100%|####", "red �"]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("step 1: loss 2.0", "info"),
        ("no errors so far, warning lights are off", "info"),
        ("2026-01-01 10:00:00 WARNING data: slow", "warning"),
        ("/x/y.py:3: UserWarning: careful", "warning"),
        ("Traceback (most recent call last):", "error"),
        ("torch.OutOfMemoryError: CUDA out of memory", "error"),
        ("[ERROR] it broke", "error"),
        ("DEBUG here", "debug"),
    ],
)
def test_a_level_is_guessed_from_the_beginning_of_a_line(text: str, level: str) -> None:
    assert level_of(text) == level


def test_a_file_that_has_grown_too_long_is_started_over_while_a_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 4_000)
    monkeypatch.setattr(log_tail, "PREVIOUS_BYTES", 1_000)
    path = tmp_path / "log"
    tail = LogTail(path)
    tail.cut_back()
    told = []
    with path.open("ab", buffering=0) as rank:
        for number in range(1_000):
            rank.write(b"line %d\n" % number)
            tail.cut_back()
            assert path.stat().st_size < 5_000
            if number % 7 == 0:
                told += texts(tail)
    told += drained(tail)
    marks = [line for line in told if line.startswith("…")]
    assert marks
    assert marks[0].endswith("log.1")
    assert [line for line in told if line not in marks] == [f"line {n}" for n in range(1_000)]
    kept = (tmp_path / "log.1").read_text()
    assert len(kept) == 1_000
    assert not (tmp_path / "log.1.1").exists()


def test_what_a_rank_makes_long_at_no_cost_is_kept_now_and_then_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "KEPT_EVERY_S", 3600.0)
    path = tmp_path / "log"
    tail = LogTail(path)
    told = []
    kept_files = set()
    for number in range(3):
        append(path, b"line %d\n" % number)
        told += drained(tail)
        os.truncate(path, 1 << 40)
        tail.cut_back()
        # Of what nobody had read, the last.
        assert path.stat().st_size < 2 * log_tail.BACKLOG_BYTES
        kept = path.with_name("log.1").stat()
        assert kept.st_size == log_tail.PREVIOUS_BYTES
        kept_files.add(kept.st_ino)
    assert len(kept_files) == 1
    assert {f"line {number}" for number in range(3)} <= set(told)


def test_a_file_that_takes_much_of_the_disk_beyond_its_end_is_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 1 << 16)
    path = tmp_path / "log"
    append(path, b"before\n")
    with path.open("ab") as rank:
        allocate = ctypes.CDLL(None).fallocate
        allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        if allocate(rank.fileno(), KEEP_SIZE, 0, 1 << 20):
            pytest.skip("the file system of temporary files keeps no room")
    tail = LogTail(path)
    assert tail.is_too_long()
    tail.cut_back()
    words, *kept = drained(tail)
    assert words.startswith("…")
    assert kept == ["before"]
    assert not tail.is_too_long()


def test_a_link_in_the_place_of_a_file_is_not_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "FILE_BYTES", 10)
    (tmp_path / "elsewhere").write_text("x" * 100)
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    LogTail(tmp_path / "log").cut_back()
    assert (tmp_path / "elsewhere").read_text() == "x" * 100


def test_a_log_that_its_rank_cut_is_read_from_its_beginning_and_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    append(path, b"one\ntwo\nthree\n")
    assert drained(tail) == ["one", "two", "three"]
    path.write_bytes(b"")
    assert tail.at_end()
    assert texts(tail) == []
    append(path, b"four\n")
    assert drained(tail) == ["four"]


def test_what_a_rank_writes_last_into_a_log_that_it_cut_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"the first line is long\n")
    tail = LogTail(path)
    assert drained(tail) == ["the first line is long"]
    path.write_bytes(b"the last\n")
    tail.end()
    assert drained(tail) == ["the last"]
    path.write_bytes(b"later\n")  # by what it left behind, over and over
    assert tail.at_end()
    assert texts(tail) == []


def test_a_log_that_its_rank_cuts_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * 10)
    tail = LogTail(path)
    with path.open("rb") as file:
        tail._pass_over(file, 4 * BACKLOG_BYTES)  # so long it was a moment before
    assert tail.at_end()
    path.write_bytes(b"one\n")
    assert texts(tail) == ["one"]


def test_what_is_written_after_the_end_of_all_ranks_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    append(path, b"one\ntwo\n")
    assert texts(tail, 1) == ["one"]
    tail.end()
    for number in range(100):  # as a process does that a rank left behind
        append(path, b"still here\n" * 100)
        if tail.at_end():
            break
        assert texts(tail, last=True) == ["two"], number
    assert tail.at_end()


def test_something_else_in_place_of_a_log_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)  # to open one would wait for a writer
    tail = LogTail(path)
    assert texts(tail) == []
    assert tail.at_end()
