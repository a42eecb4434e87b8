"""Token shards: what the command writes is what ranks train on, token by token."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.errors import CliError
from services.contract.jobs.spec_parts import Factory
from services.contract.storage.token_shards import TokenShardError, read_index
from services.worker.rank import registry
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.roots import PathOutsideRootsError
from services.worker.rank.data.share import Share

TEXT = "weave ä loom\n" * 40


def tokenize(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", "tokenize", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def rows(path: Path, seq_len: int, roots: Sequence[Path] = (), **args: Any) -> list[list[int]]:  # noqa: ANN401 (data.args)
    made = registry.create(
        "data",
        Factory(factory="tokens", args={"path": str(path), "seq_len": seq_len, **args}),
        grant=registry.Grant(data_roots=tuple(roots) or (path.parent,)),
    )
    return [made.dataset[row].tolist() for row in range(len(made.dataset))]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "one.txt").write_text(TEXT, encoding="utf-8")
    lines = [json.dumps({"text": f"row {number}", "n": number}) for number in range(3)]
    (tmp_path / "two.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "shards"
    said = tokenize(
        tmp_path / "one.txt", tmp_path / "two.jsonl", "--out", out, "--shard-tokens", 100
    )
    assert "tokens of 4 documents in 6 files" in " ".join(said.split())
    return out


def test_bytes_come_back_over_the_borders_of_files(shards: Path) -> None:
    whole = TEXT.encode() + b"\0" + b"".join(b"row %d\0" % number for number in range(3))
    index = read_index(shards)
    assert (index.tokens, index.documents, index.vocabulary) == (len(whole), 4, 256)
    assert [shard.tokens for shard in index.shards[:-1]] == [100] * (len(whole) // 100)
    for seq_len in (1, 7, 150):
        found = rows(shards, seq_len)
        assert len(found) == (len(whole) - 1) // seq_len
        assert found == [
            list(whole[start : start + seq_len + 1])
            for start in range(0, len(found) * seq_len, seq_len)
        ]


def test_a_feed_of_shards_gives_batches_of_tokens(shards: Path) -> None:
    factory = Factory(
        factory="tokens", args={"path": "shards", "seq_len": 8, "validation": "shards"}
    )
    grant = registry.Grant(data_roots=(shards.parent,))
    feed = feed_of(registry.create("data", factory, grant=grant), Share(4, 0, 1), 3)
    batch = feed.share(1)
    assert (batch.dtype, batch.shape) == (torch.int64, (4, 9))
    assert feed.validation()[0].shape == (16, 9)


def test_a_tokenizer_of_its_own_is_read_from_its_folder(tmp_path: Path) -> None:
    words = {"<end>": 0, "weave": 1, "loom": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words/tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}}
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "text.txt").write_text("weave loom weave", encoding="utf-8")
    tokenize(tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", tmp_path / "words")
    assert rows(tmp_path / "out", 3) == [[1, 70_000, 1, 0]]


def test_a_tokenizer_that_cannot_be_used_is_refused_with_its_file(tmp_path: Path) -> None:
    """As it lies in a repository whose large files were not fetched, say."""
    (tmp_path / "text.txt").write_text("weave")
    tokenizer = Tokenizer(models.WordLevel({"loom": 0}))
    empty = Tokenizer(models.WordLevel({}))
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    cases: dict[str, tuple[str, dict[str, bytes]]] = {
        "pointer": (r"tokenizer\.json is no usable tokenizer", {"tokenizer.json": pointer}),
        "unknown": (r"tokenizer\.json is no usable tokenizer: .*\[?UNK", {}),
        "empty": (r"tokenizer\.json has no tokens", {"tokenizer.json": empty.to_str().encode()}),
    }
    for number, content in enumerate((pointer, b"[]", b"\xff", b"[" * 100_000)):
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            cases[f"{name}-{number}"] = (rf"{name}: no JSON object", {name: content})
    for case, (said, files) in cases.items():
        folder = tmp_path / case
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        with pytest.raises(CliError, match=said):
            tokenize(tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", folder)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cuts_and_fills_up_gives_all_of_a_corpus_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("loom weave " * 50)
    tokenizer = Tokenizer(models.WordLevel({"loom": 0, "weave": 1, "pad": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=2, length=128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenize(tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", tmp_path)
    assert read_index(tmp_path / "out").tokens == 100


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": ["ab", "c"]}), tmp_path / "rows.parquet")
    (tmp_path / "other.parquet").write_bytes(b"PAR1 other PAR1")
    with pytest.raises(CliError, match=r"other\.parquet: no Parquet file of texts"):
        tokenize(tmp_path / "other.parquet", "--out", tmp_path / "out")
    table = arrow.table({"text": ["ab"], "n": [1]})
    parquet.write_table(table, tmp_path / "wide.parquet")
    schema = table.schema.serialize().to_pybytes()
    # Integers of 128 bits, which no library of today knows.
    wide = schema.replace(b"\x40\0\0\0", b"\x80\0\0\0")
    content = (tmp_path / "wide.parquet").read_bytes()
    changed = content.replace(base64.b64encode(schema), base64.b64encode(wide))
    assert changed != content
    (tmp_path / "wide.parquet").write_bytes(changed)
    with pytest.raises(CliError, match=r"wide\.parquet: no Parquet file of texts"):
        tokenize(tmp_path / "wide.parquet", "--out", tmp_path / "out")
    parquet.write_table(arrow.table({"text": [1]}), tmp_path / "numbers.parquet")
    with pytest.raises(CliError, match=r"numbers\.parquet: column 'text' is no text"):
        tokenize(tmp_path / "numbers.parquet", "--out", tmp_path / "out")
    with pytest.raises(CliError, match=r"no column 'text', but body; say --field"):
        tokenize(tmp_path / "rows.parquet", "--out", tmp_path / "out")
    tokenize(tmp_path / "rows.parquet", "--out", tmp_path / "out", "--field", "body")
    assert rows(tmp_path / "out", 4) == [[97, 98, 0, 99, 0]]


def test_what_is_wrong_with_the_text_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases = {
        "rows.jsonl": (b'{"text": 1}', r"rows\.jsonl:1: no text 'text', but text"),
        "a.txt": (b"\xff", "not UTF-8"),
        "deep.jsonl": (b'{"text": ' + b"[" * 100_000, r"deep\.jsonl:1: no JSON object"),
        "long.jsonl": (b'{"text": ' + b"1" * 10_000 + b"}", r"long\.jsonl:1: no JSON object"),
        "half.jsonl": (b'{"text": "\\ud800"}', r"half\.jsonl:1: 'text' is no text"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CliError, match=said):
            tokenize(tmp_path / name, "--out", out)
    with pytest.raises(CliError, match=r"no file"):
        tokenize(tmp_path / "missing.txt", "--out", out)
    with pytest.raises(CliError, match=r"tokenizer\.json is not there"):
        tokenize(tmp_path / "a.txt", "--out", out, "--tokenizer", tmp_path)
    assert not out.exists()


def test_shards_that_are_not_whole_are_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.args\.seq_len: 9999 is not within"):
        rows(shards, 9999)
    (shards / "00001.bin").write_bytes(b"ab")
    with pytest.raises(TokenShardError, match=r"00001\.bin has 2 bytes; the index says 200"):
        rows(shards, 4)
    with pytest.raises(TokenShardError, match=r"has no index\.json; `meshloom data tokenize`"):
        rows(shards.parent, 4, [shards.parent])
    with pytest.raises(PathOutsideRootsError):
        rows(shards, 4, [shards / "deeper"])


def test_a_file_that_was_changed_is_found_unless_it_is_not_to_be_read(shards: Path) -> None:
    file = shards / "00002.bin"
    written = file.read_bytes()
    file.write_bytes(written[::-1])
    for verify in (None, True):
        with pytest.raises(TokenShardError, match=r"00002\.bin has SHA-256 .*; the index says"):
            rows(shards, 4, verify=verify)
    assert rows(shards, 4, verify=False)
    file.write_bytes(written)
    assert rows(shards, 4, verify=True)


def test_an_index_whose_tokens_are_beyond_its_vocabulary_is_refused(shards: Path) -> None:
    index = json.loads((shards / "index.json").read_text(encoding="utf-8"))
    (shards / "index.json").write_text(json.dumps({**index, "vocabulary": 100}), encoding="utf-8")
    with pytest.raises(
        TokenShardError, match=r"index\.json: largest: 195 is not a token .* of 100"
    ):
        rows(shards, 4)


def test_shards_say_how_many_tokens_there_may_be(shards: Path) -> None:
    factory = Factory(factory="tokens", args={"path": str(shards), "seq_len": 8})
    made = registry.create("data", factory, grant=registry.Grant(data_roots=(shards.parent,)))
    assert feed_of(made, Share(4, 0, 1), 3).tokenizer_size == 256
