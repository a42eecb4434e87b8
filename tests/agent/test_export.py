"""Exports: whole tensors from boxes, however they lie, and nothing from what is not whole."""

import asyncio
import hashlib
import itertools
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.messages.commands import ExportCheckpoint
from services.contract.messages.facts import ExportFailed
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.exports import EXPORT_MANIFEST
from services.contract.storage.manifests import AttemptOpened, Manifest, ShardFile
from services.contract.words.ids import checkpoint_id
from services.worker.agent.storage import export as exporting
from services.worker.agent.storage import whole_tensors
from services.worker.agent.storage.exporter import Exporter
from services.worker.agent.storage.job_storage import Storage
from tests.agent.conftest import JOB

STEP = 10
NAME = checkpoint_id(JOB, STEP, 1)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def value(place: Sequence[int], whole: Sequence[int]) -> float:
    """What stands at a place of a tensor: its number in row-major order."""
    return float(sum(p * math.prod(whole[dim + 1 :]) for dim, p in enumerate(place)))


def content(whole: Sequence[int], box: Box) -> bytes:
    ranges = [range(o, o + n) for o, n in zip(*box, strict=True)]
    return b"".join(struct.pack("<f", value(p, whole)) for p in itertools.product(*ranges))


def commit(
    root: Path,
    ranks: Sequence[dict[str, tuple[tuple[int, ...], Box]]],
    lies: Mapping[str, object] = MappingProxyType({}),
) -> Manifest:
    """A committed checkpoint: of each rank, by name, the whole's shape and the box that it has.

    ``lies`` are told of each box instead of what is so.
    """
    chain = CommitChain(root, JOB)
    folder = chain.shard_folder(NAME)
    folder.mkdir(parents=True)
    shards = []
    for rank, boxes in enumerate(ranks):
        header: dict[str, object] = {}
        parts = []
        offset = 0
        about: dict[str, object] = {}
        for name, (whole, box) in boxes.items():
            part = content(whole, box)
            span = [offset, offset + len(part)]
            header[name] = {"dtype": "F32", "shape": box[1], "data_offsets": span, **lies}
            about[name] = {"global_shape": whole, "offsets": box[0], "shape": box[1], **lies}
            offset += len(part)
            parts.append(part)
        text = json.dumps({"version": 1, "boxes": about})
        head = json.dumps({"__metadata__": {"meshloom": text}, **header}).encode()
        path = folder / f"rank-{rank:05d}.safetensors"
        path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        size = path.stat().st_size
        shards.append(ShardFile(rank=rank, name=path.name, bytes=size, sha256=digest))
    manifest = Manifest(
        job_id=JOB,
        checkpoint_id=NAME,
        fence=1,
        step=STEP,
        world_size=len(ranks),
        shards=tuple(shards),
    )
    chain.append(AttemptOpened(job_id=JOB, fence=1))
    chain.append(manifest)
    return manifest


def export(root: Path, *options: str) -> exporting.ExportOutcome:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.worker.agent.storage.export"),
            *("--root", str(root), "--job", JOB, "--checkpoint", NAME, *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    outcome = exporting.ExportOutcome.model_validate_json(done.stdout)
    assert done.returncode == (0 if outcome.reason is None else 1), done.stderr
    return outcome


def test_what_another_node_writes_for_its_export_of_the_same_is_left_alone(tmp_path: Path) -> None:
    """It may wake, and publish what it finds there by the names of its own files."""
    commit(tmp_path, [{"model.weight": ((2,), ((0,), (2,)))}])
    others = exporting.partial_folder(tmp_path, JOB, NAME, "loom-1")
    others.mkdir(parents=True)
    (others / "model.safetensors").write_bytes(b"half")
    assert export(tmp_path, "--node", "loom-2").reason is None
    assert [path.read_bytes() for path in others.iterdir()] == [b"half"]


def floats(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """The tensors of a safetensors file, by its specification."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        start, end = (8 + size + place for place in entry["data_offsets"])
        found[name] = (
            entry["shape"],
            list(struct.unpack(f"<{(end - start) // 4}f", raw[start:end])),
        )
    return found


ROWS_AND_COLUMNS: list[dict[str, tuple[tuple[int, ...], Box]]] = [
    {
        "model.rows": ((5, 3), ((0, 0), (3, 3))),
        "model.columns": ((4, 6), ((0, 0), (4, 2))),
        "model.scalar": ((), ((), ())),
        "optim.rows.exp_avg": ((5, 3), ((0, 0), (3, 3))),
    },
    {
        "model.rows": ((5, 3), ((3, 0), (2, 3))),
        "model.columns": ((4, 6), ((0, 2), (4, 4))),
    },
]


def test_boxes_of_rows_and_of_columns_become_whole_tensors_of_the_model_alone(
    tmp_path: Path,
) -> None:
    commit(tmp_path, ROWS_AND_COLUMNS)
    outcome = export(tmp_path)
    assert outcome.files == ("model.safetensors",)
    folder = tmp_path / JOB / "exports" / NAME
    assert [path.name for path in folder.parent.iterdir()] == [NAME]
    assert floats(folder / "model.safetensors") == {
        "rows": ([5, 3], [float(n) for n in range(15)]),
        "columns": ([4, 6], [float(n) for n in range(24)]),
        "scalar": ([], [0.0]),
    }
    assert outcome.bytes == (folder / "model.safetensors").stat().st_size
    assert export(tmp_path) == outcome, "a second export takes the first one's place"


@pytest.mark.parametrize("readers", [True, False])
def test_the_group_of_the_storage_may_read_exports_and_nothing_else(
    tmp_path: Path,
    readers: bool,  # noqa: FBT001 a case
) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    if os.getuid() == 0:  # only root may give files to a group that it is not of
        os.chown(root, -1, 10_001)
    root.chmod(0o750 if readers else 0o700)
    before = os.umask(0o077)
    try:
        commit(root, ROWS_AND_COLUMNS)
        export(root)
    finally:
        os.umask(before)
    group = root.stat().st_gid

    def may(path: Path) -> int:
        about = path.stat()
        return (about.st_mode & 0o070) >> 3 if about.st_gid == group else 0

    job = root / JOB
    folder = job / "exports" / NAME
    files = [*folder.iterdir()]
    assert {path.name for path in files} == {"model.safetensors", EXPORT_MANIFEST}
    shared = [may(job), may(job / "exports"), may(folder), *map(may, files)]
    assert shared == ([0o1, 0o5, 0o5, 0o4, 0o4] if readers else [0] * 5)
    assert not any(path.stat().st_mode & 0o007 for path in [job, folder, *files])
    shards = CommitChain(root, JOB).shard_folder(NAME)
    assert not any(path.stat().st_mode & 0o077 for path in [shards, *shards.iterdir()])


def test_averages_of_the_weights_get_a_file_of_their_own(tmp_path: Path) -> None:
    first, second = ROWS_AND_COLUMNS
    averages = {"ema.rows": ((2, 3), ((0, 0), (2, 3)))}
    commit(tmp_path, [first | averages, second])
    assert export(tmp_path).files == ("model.safetensors", "ema.safetensors")
    folder = tmp_path / JOB / "exports" / NAME
    assert floats(folder / "ema.safetensors") == {"rows": ([2, 3], [float(n) for n in range(6)])}
    assert floats(folder / "model.safetensors").keys() == {"rows", "columns", "scalar"}


def test_a_large_model_gets_several_files_and_their_index(tmp_path: Path) -> None:
    commit(tmp_path, ROWS_AND_COLUMNS)
    outcome = export(tmp_path, "--file-bytes", "100")
    folder = tmp_path / JOB / "exports" / NAME
    *parts, index = outcome.files
    assert index == "model.safetensors.index.json"
    said = json.loads((folder / index).read_text())
    assert said["metadata"]["total_size"] == 4 * (15 + 24 + 1)
    for name, part in said["weight_map"].items():
        assert part in parts
        assert name in floats(folder / part)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_nothing_is_exported_from_what_is_not_what_was_committed(
    tmp_path: Path, damage: str
) -> None:
    manifest = commit(tmp_path, ROWS_AND_COLUMNS)
    path = CommitChain(tmp_path, JOB).shard_folder(NAME) / manifest.shards[1].name
    whole = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(whole[:-1] + (b"\0" if damage == "flip" else b""))
    outcome = export(tmp_path)
    assert outcome.corrupt_file == f"shards/{NAME}/{path.name}"
    assert list((tmp_path / JOB / "exports").iterdir()) == []


def test_what_is_written_to_a_shard_after_its_digest_was_compared_is_not_exported(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.bin"
    path.write_bytes(bytes(200_000))
    known = ShardFile(
        rank=0, name=path.name, bytes=200_000, sha256=hashlib.sha256(bytes(200_000)).hexdigest()
    )
    with ExitStack() as stack:
        shard = whole_tensors._verified(tmp_path, known, stack)
        content = whole_tensors.Content(shard, 10, 190_000)
        before = b"".join(content.parts(0, len(content)))
        with path.open("r+b") as file:  # the file that is mapped, as a rank of another job has it
            file.seek(150_000)
            file.write(b"1")
            file.flush()
            with pytest.raises(
                whole_tensors.DifferentError, match="written to while it is exported"
            ):
                list(content.parts(0, len(content)))
            file.seek(150_000)
            file.write(b"\0")
        after = b"".join(content.parts(0, len(content)))
    assert before == after == bytes(189_990)


def test_a_checkpoint_that_lacks_a_part_is_not_exported(tmp_path: Path) -> None:
    commit(tmp_path, ROWS_AND_COLUMNS[:1])
    outcome = export(tmp_path)
    assert "the shards hold 9 of 15" in str(outcome.reason)
    assert outcome.corrupt_file is None


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    manifest = commit(tmp_path, ROWS_AND_COLUMNS)
    path = CommitChain(tmp_path, JOB).shard_folder(NAME) / manifest.shards[1].name
    path.unlink()
    os.mkfifo(path)
    assert "not a plain file" in str(export(tmp_path).reason)


@pytest.mark.parametrize(
    ("whole", "box", "said"),
    [
        ((1 << 40, 2), {"shape": (1 << 40, 0)}, "rows"),
        ((1 << 40, 1 << 40), {"shape": (1 << 40, 1)}, "has 0 bytes for a box"),
        ((1 << 40, 4), {"shape": (0, 4), "offsets": (-1, 0)}, "is not a box of a tensor"),
        ((4, 4), {"offsets": (5, 0)}, "is not a box of a tensor"),
        ((4, 4), {"shape": (4, 4, 1)}, "is not a box of a tensor"),
        ((4, 4), {"shape": ("4", 4)}, "is not a box of a tensor"),
        ((4, 4), {"dtype": "F1024"}, "is not a box of a tensor"),
        ((4, 4), {"dtype": ["F32"]}, "not what a rank writes"),
        ((4, 4), {"data_offsets": None}, "not what a rank writes"),
        ((4, 4), {"data_offsets": [64, 64 + 64]}, "is not within its shard"),
        (
            (1,) * 100_000,
            {"offsets": [0] * 100_000, "shape": [1] * 100_000},
            "is not a box of a tensor",
        ),
    ],
)
def test_boxes_that_no_rank_of_ours_writes_are_refused_at_once(
    tmp_path: Path, whole: tuple[int, ...], box: dict[str, object], said: str
) -> None:
    commit(tmp_path, [{"model.odd": (whole, ((0, 0), (0, 0)))}], box)
    assert said in str(export(tmp_path).reason)


def test_boxes_that_hold_a_part_twice_and_another_not_at_all_are_refused(tmp_path: Path) -> None:
    half: Box = ((0, 0), (2, 2))
    commit(tmp_path, [{"model.a": ((4, 2), half)}, {"model.a": ((4, 2), half)}])
    assert "a part of it twice" in str(export(tmp_path).reason)


def test_arrays_that_lie_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    """A header of a megabyte could name a gigabyte ten thousand times: all would be written."""
    box: Box = ((0,), (2,))
    commit(tmp_path, [{f"model.{n}": ((2,), box) for n in range(9)}], {"data_offsets": [0, 8]})
    assert "share bytes" in str(export(tmp_path).reason)


ENDS = """
import os, signal, sys
sys.addaudithook(lambda event, _: event != "mmap.__new__" or os.kill(os.getpid(), signal.SIGBUS))
"""


def test_of_an_export_whose_process_was_ended_no_file_is_left(tmp_path: Path) -> None:
    """As by a rank that cuts a shard while it is mapped."""
    commit(tmp_path / "storage", [{"model.w": ((4,), ((0,), (4,)))}])
    (tmp_path / "sitecustomize.py").write_text(ENDS)
    storage = Storage(tmp_path / "storage", "node-1")
    exporter = Exporter(
        storage, "node-1", {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    )
    command = ExportCheckpoint(job_id=JOB, fence=1, checkpoint_id=NAME)
    (fact,) = asyncio.run(exporter.export(command))
    assert isinstance(fact, ExportFailed)
    assert fact.reason.startswith("its process exited with code -7")
    assert list((tmp_path / "storage" / JOB / "exports").iterdir()) == []


def test_what_shards_say_of_their_arrays_takes_no_more_memory_than_there_is(tmp_path: Path) -> None:
    commit(tmp_path, [{"model.a": ((1,), ((0,), (1,)))}], {"x": [[]] * 2_000_000})
    limit = 128 << 20
    code = (
        f"from services.worker.agent.storage import export as e; e._MOST_MEMORY = {limit}; e.main()"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", code),
            *("--root", str(tmp_path), "--job", JOB, "--checkpoint", NAME),
        ],
        capture_output=True,
        check=False,
    )
    reason = exporting.ExportOutcome.model_validate_json(done.stdout).reason
    assert "what the shards say of their arrays takes more than" in str(reason)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=6))
def test_boxes_overlap_where_an_element_is_in_two(boxes: list[tuple[int, int, int, int]]) -> None:
    nothing = whole_tensors.Content(whole_tensors.Shard("", memoryview(b"")), 0, 0)
    pieces = [whole_tensors.Piece((a, b), (c, d), nothing) for a, b, c, d in boxes]
    places = [
        place
        for a, b, c, d in boxes
        for place in itertools.product(range(a, a + c), range(b, b + d))
    ]
    assert whole_tensors._overlap(pieces) == (len(places) != len(set(places)))


def test_a_tensor_of_more_rows_than_are_ever_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_tensors, "_MOST_RUNS", 4)
    commit(tmp_path, [{"model.columns": ((5, 2), ((0, 0), (5, 1)))}])
    with pytest.raises(whole_tensors.IncompleteError, match="more than 4 rows"):
        exporting.export(tmp_path, JOB, NAME, 1 << 20)


def test_tensors_of_more_rows_than_their_bytes_take_time_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor has too many; together they would keep the node from other exports for a day."""
    monkeypatch.setattr(whole_tensors, "_ANY_RUNS", 39)
    halves: list[dict[str, tuple[tuple[int, ...], Box]]] = [
        {f"model.{n}": ((5, 2), ((0, column), (5, 1))) for n in range(4)} for column in range(2)
    ]
    commit(tmp_path, halves)
    with pytest.raises(whole_tensors.IncompleteError, match="40 rows of 160 bytes"):
        exporting.export(tmp_path, JOB, NAME, 1 << 20)
    monkeypatch.setattr(whole_tensors, "_BYTES_A_RUN", 160)
    assert exporting.export(tmp_path, JOB, NAME, 1 << 20).reason is None


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_order(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.integers(1, 4), max_size=4))
    offsets = [data.draw(st.integers(0, extent - 1)) for extent in whole]
    shape = [
        data.draw(st.integers(1, extent - offset))
        for extent, offset in zip(whole, offsets, strict=True)
    ]
    length = whole_tensors.run_length(whole, shape)
    found = [
        start + i for start in whole_tensors.runs(whole, offsets, shape) for i in range(length)
    ]
    ranges = [range(o, o + n) for o, n in zip(offsets, shape, strict=True)]
    assert found == [value(place, whole) for place in itertools.product(*ranges)]


def test_a_tensor_of_more_boxes_than_ranks_may_be_is_refused() -> None:
    content = whole_tensors.Content(whole_tensors.Shard("", memoryview(b"1234")), 0, 4)
    piece = whole_tensors.Piece((0,), (1,), content)
    with pytest.raises(whole_tensors.IncompleteError, match="65537 boxes"):
        whole_tensors._overlap([piece] * 65_537)
