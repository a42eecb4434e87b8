"""Rows of local files, read by Hugging Face's ``datasets``: as they are, or as packed tokens."""

import importlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from meshloom.data import MapSource
from services.contract.storage.token_shards import end_token
from services.worker.rank.data import digests
from services.worker.rank.data.roots import inside

_MASKED: Final = -100
_BYTES: Final = "bytes"
_AT_ONCE: Final = 1_000
_KINDS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_Encode = Callable[[list[str]], Iterable[Sequence[int]]]
_Tokens = npt.NDArray[np.int32]


class TokenRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of one length, as models of ``transformers`` take them.

    Args:
        columns: int32 ``[rows, seq_len]`` by name.
        tokenizer_size: How many tokens the tokenizer has.
    """

    def __init__(self, columns: dict[str, _Tokens], tokenizer_size: int) -> None:
        self._columns = columns
        self.tokenizer_size = tokenizer_size
        self.digest = digests.of_values("rows", columns)

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(column[row].astype(np.int64))
            for name, column in self._columns.items()
        }


def hf_dataset(  # noqa: PLR0913 (the fields of data.args)
    files: str | Sequence[str],
    *,
    tokenizer: str | None = None,
    seq_len: int = 1024,
    text: str = "text",
    prompt: str | None = None,
    columns: Sequence[str] | None = None,
    validation: str | Sequence[str] | None = None,
    validation_fraction: float = 0.0,
    validation_batch: int = 16,
    workers: int = 0,
    packing: bool = True,
    data_roots: Sequence[Path] | None = None,
) -> MapSource:
    """Reads local files into memory by ``datasets``; nothing is downloaded, and no cache is left.

    With ``tokenizer``, a sample is a mapping of int64 ``[seq_len]``: ``input_ids``, and ``labels`` that
    are the same, or -100 where no loss is taken. A document is its prompt, its text and the tokenizer's
    end token. Packed, documents follow each other through the rows, and what fills no row at the end
    is left out. Else each has a row of its own, cut or padded, with an ``attention_mask``.

    Without ``tokenizer``, a sample is a mapping of the columns as tensors.

    Args:
        files: JSON (a row a line), parquet, arrow, or plain text (a document each); one, or several of
            one kind, or a folder of them.
        tokenizer: A folder with ``tokenizer.json``, or ``bytes``.
        seq_len: Tokens of a row.
        text: The column with what is learnt.
        prompt: A column with what comes before it and is not learnt (-100 in ``labels``).
        columns: Without ``tokenizer``: these alone.
        validation: Further files, to validate on.
        validation_fraction: Without them, which part of the rows is only validated on.
        validation_batch: Rows that a rank evaluates at a time.
        workers: Processes of each rank that read ahead.
        packing: Whether documents share rows.
        data_roots: Folders below which all files must lie; None: anywhere.

    Raises:
        ImportError: ``datasets`` or ``tokenizers`` is not installed.
        PathOutsideRootsError: A file lies elsewhere.
        ValueError: A file is of another kind, a column is not there, or there is too little text.
    """
    makes = _rows_as_they_are(columns)
    if tokenizer is not None:
        folder = tokenizer if tokenizer == _BYTES else str(_path(tokenizer, data_roots))
        makes = _tokenized(folder, seq_len, text, prompt, packing=packing)
    return MapSource(
        dataset=makes(_loaded("files", files, data_roots)),
        validation=None
        if validation is None
        else makes(_loaded("validation", validation, data_roots)),
        validation_fraction=validation_fraction,
        validation_batch=validation_batch,
        workers=workers,
    )


def _loaded(name: str, files: str | Sequence[str], data_roots: Sequence[Path] | None) -> Any:  # noqa: ANN401 (of a library that need not be there)
    named = [_path(each, data_roots) for each in ([files] if isinstance(files, str) else files)]
    found = [
        part
        for path in named
        for part in (
            sorted(each for each in path.iterdir() if each.suffix in _KINDS)
            if path.is_dir()
            else [path]
        )
    ]
    missing = [str(path) for path in found if not path.is_file()]
    kinds = {_KINDS.get(path.suffix) for path in found}
    if missing or len(kinds) != 1 or None in kinds:
        what = (
            f"{missing[0]} does not exist"
            if missing
            else f"{', '.join(map(str, found)) or 'nothing'}"
        )
        raise ValueError(
            f"data.args.{name}: {what}; it takes files of one kind, which end with "
            f"{', '.join(_KINDS)}, or a folder of them"
        )
    if data_roots is not None:
        found = [inside(path, data_roots) for path in found]
    datasets = _library("datasets")
    (kind,) = kinds
    options = {"sample_by": "document"} if kind == "text" else {}
    shows = datasets.utils.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as cache:
            return datasets.load_dataset(
                kind,
                data_files=[str(path) for path in found],
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **options,
            )
    finally:
        if shows:
            datasets.enable_progress_bars()


def _path(path: str, data_roots: Sequence[Path] | None) -> Path:
    return Path(path) if data_roots is None else inside(path, data_roots)


def _rows_as_they_are(columns: Sequence[str] | None) -> Callable[[Any], Any]:
    def make(rows: Any) -> Any:  # noqa: ANN401 (of a library that need not be there)
        if columns is None:
            return rows
        for column in columns:
            _check_column(rows, "columns", column)
        return rows.select_columns(list(columns))

    return make


def _check_column(rows: Any, field: str, column: str) -> None:  # noqa: ANN401 (as above)
    if column not in rows.column_names:
        raise ValueError(
            f"data.args.{field}: the files have no column {column!r}, but "
            f"{', '.join(rows.column_names)}"
        )


# -- Tokens


def _tokenized(
    folder: str, seq_len: int, text: str, prompt: str | None, *, packing: bool
) -> Callable[[Any], TokenRows]:
    if seq_len < 1:
        raise ValueError(f"data.args.seq_len: {seq_len} is below 1")
    encode, end, size = _encoder(folder)

    def make(rows: Any) -> TokenRows:  # noqa: ANN401 (as above)
        _check_column(rows, "text", text)
        if prompt is not None:
            _check_column(rows, "prompt", prompt)
        documents = []
        for start in range(0, len(rows), _AT_ONCE):
            block = rows[start : start + _AT_ONCE]
            learnt = encode([each or "" for each in block[text]])
            before: Iterable[Sequence[int]] = [()] * len(block[text])
            if prompt is not None:
                before = encode([each or "" for each in block[prompt]])
            documents += [_document(*pair, end) for pair in zip(before, learnt, strict=True)]
        packed = _packed(documents, seq_len) if packing else _padded(documents, seq_len, end or 0)
        return TokenRows(packed, size)

    return make


def _encoder(folder: str) -> tuple[_Encode, int | None, int]:
    """From texts to tokens; the one that ends a text; how many there are."""
    if folder == _BYTES:
        return lambda texts: [text.encode() for text in texts], 0, 256
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"data.args.tokenizer: {file} does not exist; save_pretrained of a fast tokenizer "
            "writes it"
        )
    found = _library("tokenizers").Tokenizer.from_file(str(file))
    ending = end_token(file.parent)

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        return [each.ids for each in found.encode_batch(texts, add_special_tokens=False)]

    end = None if ending is None else found.token_to_id(ending)
    return encode, end, max(found.get_vocab().values(), default=0) + 1


def _document(
    before: Sequence[int], learnt: Sequence[int], end: int | None
) -> tuple[_Tokens, _Tokens]:
    """Tokens and labels."""
    ids = [*before, *learnt, *(() if end is None else (end,))]
    labels = [*[_MASKED] * len(before), *ids[len(before) :]]
    return np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)


def _packed(documents: Sequence[tuple[_Tokens, _Tokens]], seq_len: int) -> dict[str, _Tokens]:
    flat = (
        [np.concatenate([each[part] for each in documents]) for part in (0, 1)] if documents else []
    )
    rows = len(flat[0]) // seq_len if flat else 0
    if not rows:
        raise ValueError(
            f"data.args.seq_len: {seq_len} is more than the "
            f"{len(flat[0]) if flat else 0} tokens of all documents"
        )
    ids, labels = (part[: rows * seq_len].reshape(rows, seq_len) for part in flat)
    return {"input_ids": ids, "labels": labels}


def _padded(
    documents: Sequence[tuple[_Tokens, _Tokens]], seq_len: int, filler: int
) -> dict[str, _Tokens]:
    shape = (len(documents), seq_len)
    ids, labels = np.full(shape, filler, np.int32), np.full(shape, _MASKED, np.int32)
    mask = np.zeros(shape, np.int32)
    for row, (tokens, targets) in enumerate(documents):
        length = min(seq_len, len(tokens))
        ids[row, :length], labels[row, :length] = tokens[:length], targets[:length]
        mask[row, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _library(name: str) -> Any:  # noqa: ANN401 (of a package that need not be there)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"data.factory: hf_dataset needs {name}: pip install 'meshloom[data]' on every node"
        ) from error
