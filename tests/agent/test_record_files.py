"""Files of a job's records: what a crash, a full disk, a second writer and a hostile rank leave of them."""

import gzip
import os
from pathlib import Path

import pytest

from services.contract.messages.telemetry import LogLine, StepRecord
from services.contract.words.ids import new_job_id
from services.worker.agent.storage import record_files
from services.worker.agent.storage.record_files import (
    LOGS,
    STEPS,
    Entries,
    EntryId,
    Kind,
    Part,
    close,
    line_of,
    read_entries,
    records_folder,
)

JOB = new_job_id(1_700_000_000_000, bytes(10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / JOB).mkdir()
    return tmp_path


def part(root: Path, fence: int = 1, writer: str = "n-1.life", kind: Kind = STEPS) -> Part:
    return Part(root, JOB, kind, fence, writer)


def steps(first: int, last: int, fence: int = 1) -> Entries:
    return {
        EntryId(1_000 + fence * 1_000 + step, 0): StepRecord(
            step=step, fence=fence, loss=1 / step, tokens_per_s=1.0, step_time_s=0.1
        ).model_dump_json()
        for step in range(first, last + 1)
    }


def lines(count: int, text: str = "x") -> Entries:
    return {
        EntryId(1_000 + n, 0): LogLine(
            rank=0, fence=1, stream="stdout", time_ms=n, text=f"{n} {text}"
        ).model_dump_json()
        for n in range(count)
    }


def stored(root: Path, kind: Kind = STEPS) -> Entries:
    return read_entries(root, JOB, kind)


def files(root: Path) -> set[str]:
    return {path.name for path in records_folder(root, JOB).iterdir()}


def _dies(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_was_appended_is_read_as_it_was_with_its_ids(root: Path) -> None:
    part(root).append(steps(1, 3).items())
    part(root).append(steps(4, 5).items())
    assert stored(root) == steps(1, 5)


def test_a_torn_line_costs_itself_alone(root: Path) -> None:
    part(root).append(steps(1, 3).items())
    os.truncate(part(root).path, part(root).path.stat().st_size - 20)
    part(root).append(steps(4, 4).items())
    kept = steps(1, 4)
    del kept[EntryId(2_003, 0)]
    assert stored(root) == kept


def test_files_of_nodes_and_attempts_are_one_curve_and_what_is_in_two_is_there_once(
    root: Path,
) -> None:
    part(root).append(steps(1, 5).items())
    part(root, writer="n-2.life").append(steps(4, 7).items())
    part(root, fence=2).append(steps(5, 9, fence=2).items())
    assert stored(root) == steps(1, 7) | steps(5, 9, fence=2)
    close(root, JOB, STEPS, steps(8, 8))
    assert stored(root) == steps(1, 8) | steps(5, 9, fence=2)
    assert files(root) == {"steps.jsonl.gz"}


def test_closing_that_is_interrupted_anywhere_loses_nothing_and_doubles_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(root).append(steps(1, 5).items())
    part(root, fence=2).append(steps(6, 9, fence=2).items())
    whole = stored(root)
    for name in ("open", "replace", "unlink"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, _dies)
            with pytest.raises(KeyboardInterrupt):
                close(root, JOB, STEPS, {})
        assert stored(root) == whole, name
    close(root, JOB, STEPS, {})
    assert stored(root) == whole


def test_at_a_launch_only_files_of_older_attempts_are_put_together(root: Path) -> None:
    for fence in (1, 2, 3):
        part(root, fence=fence).append(steps(1, 2, fence=fence).items())
    close(root, JOB, STEPS, {}, before_fence=3)
    assert files(root) == {"steps.jsonl.gz", part(root, fence=3).path.name}
    assert set(stored(root)) == {i for f in (1, 2, 3) for i in steps(1, 2, fence=f)}


def test_a_closed_file_that_is_damaged_costs_what_follows_the_damage(root: Path) -> None:
    part(root).append(steps(1, 2_000).items())
    close(root, JOB, STEPS, {})
    closed = records_folder(root, JOB) / "steps.jsonl.gz"
    content = closed.read_bytes()
    closed.write_bytes(content[: len(content) // 2])
    left = stored(root)
    assert left
    assert left.items() <= steps(1, 2_000).items()


def test_a_flood_leaves_two_files_of_bounded_length_and_the_newest_entries(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "PART_BYTES", 20_000)
    monkeypatch.setattr(record_files, "CLOSED_BYTES", 10_000)
    flood = lines(1_000, "flood" * 20)
    mine = part(root, kind=LOGS)
    for start in range(0, 1_000, 50):
        mine.append(list(flood.items())[start : start + 50])
    sizes = [path.stat().st_size for path in records_folder(root, JOB).iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 20_000 + 50 * 250
    newest = stored(root, LOGS)
    assert sum(map(len, newest.values())) <= 10_000
    assert newest == dict(list(flood.items())[-len(newest) :])
    close(root, JOB, LOGS, {})
    assert stored(root, LOGS) == newest


def test_of_a_kind_no_more_is_closed_than_redis_keeps(root: Path) -> None:
    part(root, kind=LOGS).append(lines(LOGS.kept + 10).items())
    close(root, JOB, LOGS, {})
    assert list(stored(root, LOGS)) == [EntryId(1_010 + n, 0) for n in range(LOGS.kept)]


def test_what_a_rank_puts_there_is_passed_over_and_waited_for_by_nobody(root: Path) -> None:
    part(root).append(steps(1, 3).items())
    folder = records_folder(root, JOB)
    garbage = folder / "steps.0009.evil.jsonl"
    garbage.write_bytes(
        b'{"id":"1-1","step":"no"}\n{"id":"99999999999999999999-1","step":1}\n\xff\xfe\n[]\n'
        + b"x" * 3_000_000
        + b"\n"
    )
    (folder / "steps.0010.evil.jsonl").mkdir()
    (folder / "steps.not a name.jsonl").write_text("x")
    (folder / "steps.jsonl.gz").write_bytes(gzip.compress(bytes(200 << 20)))
    (folder / "steps.0011.evil.jsonl").symlink_to("/dev/zero")
    assert stored(root) == steps(1, 3)
    os.mkfifo(part(root, fence=2).path)
    part(root, fence=2).append(steps(4, 4, fence=2).items())
    assert stored(root) == steps(1, 3) | steps(4, 4, fence=2)


def test_nothing_is_read_of_what_follows_a_closed_file(root: Path) -> None:
    """A terabyte of zeros takes no room, and days to read."""
    part(root).append(steps(1, 3).items())
    close(root, JOB, STEPS, {})
    os.truncate(records_folder(root, JOB) / "steps.jsonl.gz", 1 << 40)
    assert stored(root) == steps(1, 3)
    close(root, JOB, STEPS, steps(4, 4))
    assert stored(root) == steps(1, 4)


def test_a_closed_file_that_holds_no_text_is_read_no_further_than_any_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_MOST_READ", 10_000)
    closed = records_folder(root, JOB) / "steps.jsonl.gz"
    closed.parent.mkdir()
    whole = gzip.compress("".join(line_of(*entry) for entry in steps(1, 2).items()).encode())
    header, empty_block = whole[:10], b"\0\0\0\xff\xff"
    closed.write_bytes(header + empty_block * 100 + whole[10:])
    assert stored(root) == steps(1, 2)
    closed.write_bytes(header + empty_block * 10_000 + whole[10:])
    assert stored(root) == {}


def test_nothing_is_written_for_a_job_that_was_purged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        part(tmp_path).append(steps(1, 1).items())
    with pytest.raises(FileNotFoundError):
        close(tmp_path, JOB, STEPS, steps(1, 1))
    assert list(tmp_path.iterdir()) == []


def test_lines_that_hold_nothing_are_read_no_further_than_any_others(root: Path) -> None:
    closed = records_folder(root, JOB) / "steps.jsonl.gz"
    closed.parent.mkdir()
    with gzip.open(closed, "wb", compresslevel=1) as file:
        # A MiB of them takes a minute; the bound is that of as many lines as a file of ours has.
        for _ in range(4):
            file.write(b"\n" * (1 << 20))
        file.writelines(line_of(name, body).encode() for name, body in steps(1, 2).items())
    assert stored(root) == {}


def test_of_many_long_parts_the_newest_of_each_is_read_and_no_more_than_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_MOST_READ", 64 << 10)
    monkeypatch.setattr(record_files, "_MOST_READ_OF_ALL", 128 << 10)
    records = [steps(1, 900, fence) for fence in range(1, 9)]
    for fence, entries in enumerate(records, start=1):
        part(root, fence).append(entries.items())
    read = stored(root)
    assert all(list(entries)[-1] in read for entries in records)
    assert sum(map(len, read.values())) < 128 << 10
