"""Data sets of Hugging Face: local files by the built-in factory, and tables that a factory returns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]  # it has none
import pyarrow as pa  # type: ignore[import-untyped]  # it has none
import pytest
import torch
from pyarrow import ipc, parquet

from meshloom import MapSource
from meshloom.data import Batch
from services.contract.jobs.spec_parts import Factory
from services.worker.rank import registry
from services.worker.rank.data.batches import predicted_tokens
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.roots import PathOutsideRootsError
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import Feed

ROWS = [{"ask": f"{n}?", "text": f"answer {n}", "score": n / 2} for n in range(6)]
Made = Callable[..., Feed]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The feed of ``hf_dataset`` with these arguments, one sample a step."""

    def make(**args: Any) -> Feed:  # noqa: ANN401 (data.args)
        grant = registry.Grant(data_roots=(tmp_path,))
        factory = Factory(factory="hf_dataset", args=args)
        return feed_of(registry.create("data", factory, grant=grant), Share(1, 0, 1), 3)

    return make


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, ROWS))
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    table = pa.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with ipc.new_stream(tmp_path / "rows.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "prose").mkdir()
    for name in "ab":
        (tmp_path / f"prose/{name}.txt").write_text(f"{name} line\n{name} end\n", encoding="utf-8")


def epoch(feed: Feed, count: int) -> list[Batch]:
    return [feed.share(step) for step in range(1, count + 1)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_of_files_are_samples(made: Made, kind: str) -> None:
    feed = made(files=f"rows.{kind}", columns=["score", "text"])
    batches = epoch(feed, 6)
    assert all(set(batch) == {"score", "text"} for batch in batches)
    assert sorted(float(batch["score"]) for batch in batches) == [row["score"] for row in ROWS]


def test_documents_are_packed_end_to_end(made: Made) -> None:
    feed = made(files="rows.jsonl", tokenizer="bytes", seq_len=7)
    whole = b"".join(row["text"].encode() + b"\0" for row in ROWS)  # type: ignore[attr-defined]  # it is a text
    found = epoch(feed, len(whole) // 7)
    rows = sorted(bytes(batch["input_ids"][0].tolist()) for batch in found)
    assert rows == sorted(whole[start : start + 7] for start in range(0, len(whole) - 6, 7))
    assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in found)
    assert predicted_tokens(found[0]) == 6


def test_prompts_are_read_and_not_learnt(made: Made) -> None:
    feed = made(files="rows.parquet", tokenizer="bytes", seq_len=14, prompt="ask", packing=False)
    for batch in epoch(feed, 6):
        number = int(bytes(batch["input_ids"][0, :1].tolist()))
        text = b"%d?answer %d\0" % (number, number)
        padding = 14 - len(text)
        assert bytes(batch["input_ids"][0].tolist()) == text + b"\0" * padding
        learnt = [-100, -100, *text[2:], *[-100] * padding]
        assert batch["labels"][0].tolist() == learnt
        assert batch["attention_mask"][0].tolist() == [1] * len(text) + [0] * padding


def test_a_folder_of_text_has_a_document_a_file(made: Made) -> None:
    feed = made(
        files="prose", tokenizer="bytes", seq_len=20, packing=False, validation=["prose/a.txt"]
    )
    texts = {bytes(batch["input_ids"][0].tolist()).rstrip(b"\0") for batch in epoch(feed, 2)}
    assert texts == {b"a line\na end\n", b"b line\nb end\n"}
    (held,) = feed.validation()
    assert bytes(held["input_ids"][0, :1].tolist()) == b"a"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"files": "rows.csv"}, r"data\.args\.files: .*rows\.csv does not exist"),
        ({"files": ["rows.jsonl", "rows.parquet"]}, r"data\.args\.files: .* files of one kind"),
        ({"files": "rows.jsonl", "columns": ["x"]}, r"no column 'x', but ask, text, score"),
        (
            {"files": "rows.jsonl", "tokenizer": "bytes", "text": "x"},
            r"data\.args\.text: .*no column",
        ),
        (
            {"files": "rows.jsonl", "tokenizer": "."},
            r"data\.args\.tokenizer: .*tokenizer\.json does not exist",
        ),
        (
            {"files": "rows.jsonl", "tokenizer": "bytes", "seq_len": 999},
            r"seq_len: 999 is more than",
        ),
        ({"files": "rows.jsonl", "tokenizer": "bytes", "seq_len": 0}, r"seq_len: 0 is below 1"),
    ],
)
def test_wrong_arguments_are_named(made: Made, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**args)


def test_files_lie_below_the_roots_of_the_node(made: Made, tmp_path: Path) -> None:
    (tmp_path / "prose/leak.txt").symlink_to(Path(__file__))
    for files in ("prose", str(Path(__file__))):
        with pytest.raises(PathOutsideRootsError):
            made(files=files)


def test_a_table_that_a_factory_returns_is_a_data_set() -> None:
    def table(rows: list[dict[str, Any]]) -> Any:  # noqa: ANN401 (of a library without types)
        return datasets.Dataset.from_list(rows)

    def feed(made: object) -> Feed:
        return feed_of(made, Share(6, 0, 1), 3)

    rows = [{"input_ids": [n, n + 1, n + 2], "label": n % 2} for n in range(6)]
    one = feed(table(rows))
    batch = one.share(1)
    assert batch["input_ids"].shape == (6, 3)
    assert batch["label"].dtype == torch.int64
    both = datasets.DatasetDict(train=table(rows), validation=table(rows[:2]))
    assert [len(each["label"]) for each in feed(both).validation()] == [2]
    joined = datasets.concatenate_datasets([table(rows[:2]), table(rows[2:])])
    assert feed(joined).digest == one.digest
    assert feed(table(rows[::-1])).digest != one.digest
    assert feed(table(rows).shuffle(seed=1)).digest != one.digest
    assert feed(MapSource(dataset=table(rows), workers=1)).digest == one.digest


def test_a_shuffled_stream_goes_on_with_the_samples_that_waited_in_its_buffer() -> None:
    def begun() -> Feed:
        rows = datasets.Dataset.from_dict({"number": range(40)}).to_iterable_dataset()
        mixed = rows.shuffle(seed=3, buffer_size=8).map(lambda row: {"twice": 2 * row["number"]})
        return feed_of(mixed.with_format("torch"), Share(1, 0, 1), 3)

    whole, resumed = begun(), begun()
    for step in range(1, 8):
        whole.share(step)
    resumed.restore(json.loads(json.dumps(whole.state())), 7)
    for step in range(8, 90):
        assert int(resumed.share(step)["twice"]) == int(whole.share(step)["twice"])
