"""``meshloom data tokenize``: text files become token shards, which the factory ``tokens`` trains on."""

import contextlib
import hashlib
import importlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.errors import CliError
from services.cli.lazy import Command, Group
from services.cli.output import answers, as_data, for_programs
from services.cli.terminal import console, errors
from services.contract.storage.token_shards import (
    INDEX_NAME,
    MOST_IN_TWO_BYTES,
    TokenIndex,
    TokenShard,
    end_token,
)

_BYTES: Final = "bytes"
_PIECE: Final = 1 << 20
_AT_ONCE: Final = 4 << 20
_TYPECODES: Final = {"uint16": "H", "uint32": "I"}
_JSON_LINES: Final = frozenset({".jsonl", ".json", ".ndjson"})

data = typer.Typer(
    cls=Group, help="Prepare data for training.", no_args_is_help=True, rich_markup_mode="rich"
)


@data.callback()
def _group() -> None:
    """Prepare data for training."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into tokens.

    Attributes:
        name: For people.
        vocabulary: How many tokens there are.
        divider: What stands between documents.
        encode: Of several texts at once.
    """

    name: str
    vocabulary: int
    divider: int | None
    encode: Callable[[list[str]], Iterable[Sequence[int]]]


@dataclass(frozen=True)
class Piece:
    """A part of a document, and how many bytes were read for it; ``ends``: it is the last one."""

    text: str
    nbytes: int
    ends: bool


@data.command(cls=Command)
@answers
def tokenize(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES", help="Plain text (a document each), .jsonl or .parquet (a row each)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder to make.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER",
            help="A folder with tokenizer.json, or 'bytes' (256 tokens).",
        ),
    ] = _BYTES,
    field: Annotated[
        str, typer.Option("--field", metavar="NAME", help="Of a row, what its text is called.")
    ] = "text",
    shard_tokens: Annotated[
        int,
        typer.Option("--shard-tokens", metavar="N", min=1, help="How many tokens a file takes."),
    ] = 100_000_000,
) -> None:
    """Write the tokens of FILES to a folder that the data factory `tokens` reads.

    Example:
      meshloom data tokenize corpus.jsonl --out shards --tokenizer ./llama
    """
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise CliError(f"{missing} is no file")
    if out.exists():
        raise CliError(f"{out} is there already; remove it or choose another folder")
    made = tokenizer_of(tokenizer)
    total = sum(file.stat().st_size for file in files)
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors if for_programs() else console) as progress:
        task = progress.add_task("", total=total)
        pieces = (piece for file in files for piece in pieces_of(file, field))
        index = write(pieces, made, out, shard_tokens, lambda n: progress.advance(task, n))
    if as_data({"folder": str(out), **index.model_dump(mode="json")}):
        return
    console.print(
        f"{index.tokens:,} tokens of {index.documents:,} documents in {len(index.shards)} "
        f"file{'s' * (len(index.shards) != 1)} at {out}; digest {index.digest[:12]}. "
        f"Train on them by data: {{factory: tokens, args: {{path: {out}, seq_len: 1024}}}}; the model "
        f"needs {index.vocabulary:,} tokens."
    )


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer in a folder, or that of bytes.

    Raises:
        CliError: There is none, it cannot be read, or the library that reads it is not installed.
    """
    if name == _BYTES:
        return Tokenizer(_BYTES, 256, 0, lambda texts: [text.encode() for text in texts])
    file = Path(name) / "tokenizer.json"
    if not file.is_file():
        raise CliError(
            f"--tokenizer: {file} is not there; save_pretrained of a fast tokenizer writes it, or say "
            f"{_BYTES}"
        )
    library = _library("tokenizers")
    with _refusals_of(file):
        found = library.Tokenizer.from_file(str(file))
        # A saved one may cut or fill up what it gets: of a corpus all is wanted, and nothing else.
        found.no_truncation()
        found.no_padding()
    try:
        divider = end_token(file.parent)
    except ValueError as error:
        raise CliError(f"--tokenizer: {error}") from error
    vocabulary = max(found.get_vocab().values(), default=-1) + 1
    if not vocabulary:
        raise CliError(f"--tokenizer: {file} has no tokens")

    def encode(texts: list[str]) -> list[Sequence[int]]:
        with _refusals_of(file):
            return [each.ids for each in found.encode_batch(texts, add_special_tokens=False)]

    return Tokenizer(
        file.parent.name,
        vocabulary,
        None if divider is None else found.token_to_id(divider),
        encode,
    )


@contextlib.contextmanager
def _refusals_of(file: Path) -> Iterator[None]:
    """What the library says of a tokenizer that it cannot use, in words of the command line."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    # The library has no class of its own for them, and one that is no Exception for some.
    except BaseException as error:
        raise CliError(f"--tokenizer: {file} is no usable tokenizer: {error}") from error


def pieces_of(file: Path, field: str) -> Iterator[Piece]:
    """The text of a file, in parts of about 1 MiB that end with a line.

    Raises:
        CliError: A row has no such field, or the file is not UTF-8.
    """
    if file.suffix == ".parquet":
        yield from _rows_of_parquet(file, field)
        return
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            if file.suffix in _JSON_LINES:
                for number, line in enumerate(lines, start=1):
                    yield Piece(
                        _field(line, field, f"{file}:{number}"), len(line.encode()), ends=True
                    )
                return
            while block := lines.readlines(_PIECE):
                text = "".join(block)
                yield Piece(text, len(text.encode()), ends=False)
            yield Piece("", 0, ends=True)
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8: {error}") from error


def write(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    out: Path,
    shard_tokens: int,
    advance: Callable[[int], None] = lambda _: None,
) -> TokenIndex:
    """Writes shards and index to a new folder, which is there when all of it is.

    Args:
        pieces: The text.
        tokenizer: Of it.
        out: The folder.
        shard_tokens: Tokens of a file.
        advance: Told of bytes that were read.

    Raises:
        CliError: There is no text.
    """
    draft = out.with_name(out.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    writer = _Writer(draft, tokenizer, shard_tokens)
    for some in _together(pieces):
        # At once, because tokenizers share a batch out over the cores.
        encoded = tokenizer.encode([piece.text for piece in some])
        for piece, ids in zip(some, encoded, strict=True):
            writer.add(ids, ends=piece.ends)
            advance(piece.nbytes)
    index = writer.finished()
    if not index.tokens:
        shutil.rmtree(draft)
        raise CliError("the files have no text, so there is nothing to train on")
    (draft / INDEX_NAME).write_text(index.model_dump_json(indent=1) + "\n", encoding="utf-8")
    draft.rename(out)
    return index


def _together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of about 4 MiB in all."""
    some: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        some.append(piece)
        nbytes += piece.nbytes
        if nbytes >= _AT_ONCE:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


class _Writer:
    """Fills one file after the other."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._room = shard_tokens
        self._dtype: Any = "uint16" if tokenizer.vocabulary <= MOST_IN_TWO_BYTES else "uint32"
        self._shards: list[TokenShard] = []
        self._pending = array(_TYPECODES[self._dtype])
        self._largest = 0
        self._documents = 0

    def add(self, ids: Sequence[int], *, ends: bool) -> None:
        self._pending.extend(ids)
        self._largest = max(self._largest, max(ids, default=0))
        if ends:
            self._documents += 1
            if self._tokenizer.divider is not None:
                self._pending.append(self._tokenizer.divider)
                self._largest = max(self._largest, self._tokenizer.divider)
        while len(self._pending) >= self._room:
            self._flush(self._room)

    def finished(self) -> TokenIndex:
        if self._pending:
            self._flush(len(self._pending))
        return TokenIndex(
            dtype=self._dtype,
            tokenizer=self._tokenizer.name,
            vocabulary=self._tokenizer.vocabulary,
            largest=self._largest,
            divider=self._tokenizer.divider,
            documents=self._documents,
            shards=tuple(self._shards),
        )

    def _flush(self, count: int) -> None:
        part, self._pending = self._pending[:count], self._pending[count:]
        part = array(_TYPECODES[self._dtype], part)
        if array("H", [1]).tobytes() != b"\x01\x00":
            part.byteswap()
        name = f"{len(self._shards):05d}.bin"
        with (self._folder / name).open("wb") as file:
            digest = _written(file, part.tobytes())
        self._shards.append(TokenShard(file=name, tokens=count, sha256=digest))


def _written(file: BinaryIO, content: bytes) -> str:
    file.write(content)
    return hashlib.sha256(content).hexdigest()


def _rows_of_parquet(file: Path, field: str) -> Iterator[Piece]:
    parquet = _library("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise CliError(
                f"{file} has no column {field!r}, but {', '.join(table.schema_arrow.names)}; say --field"
            )
        share = file.stat().st_size // max(1, table.metadata.num_rows)
        for batch in table.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise CliError(f"{file}: column {field!r} is no text; say --field")
                yield Piece(text or "", share, ends=True)
    # Of what is no Parquet file, of a part of one, of texts that are no UTF-8, and of kinds that it does not know.
    except (OSError, ValueError, NotImplementedError) as error:
        raise CliError(f"{file}: no Parquet file of texts: {error}") from error


def _field(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    # Other than JSON says: nested too deep, or a number of too many digits.
    except (ValueError, RecursionError) as error:
        raise CliError(f"{where}: no JSON object on one line: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise CliError(f"{where}: no text {field!r}, but {has}; say --field")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CliError(f"{where}: {field!r} is no text: {error}") from error
    return text


def _library(name: str) -> Any:  # noqa: ANN401 (of a package that need not be there)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CliError(f"{error}; install the extra: pip install 'meshloom[data]'") from error
