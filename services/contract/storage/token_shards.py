"""Tokenised text on disk: files of plain integers and one index that describes them.

::

    DIR/index.json      TokenIndex
    DIR/00000.bin       tokens one after the other, little-endian, of the index's dtype
    DIR/00001.bin       the text goes on

A document may go on in the next file; documents are divided by ``divider`` where there is one.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

INDEX_NAME: Final = "index.json"
MOST_IN_TWO_BYTES: Final = 1 << 16
TOKEN_BYTES: Final = {"uint16": 2, "uint32": 4}


class TokenShardError(ValueError):
    """A folder is no whole set of token shards."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TokenShard(_Part):
    """One file."""

    file: Annotated[str, Field(pattern=r"^[0-9]{5}\.bin$")]
    tokens: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TokenIndex(_Part):
    """What the files hold. ``vocabulary`` counts the tokenizer's tokens, ``largest`` is the highest found."""

    format: Literal["meshloom-tokens"] = "meshloom-tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    tokenizer: str
    vocabulary: int = Field(ge=1)
    largest: int = Field(ge=0)
    divider: int | None = None
    documents: int = Field(ge=0)
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        """Of all files."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """Names all tokens, in their order."""
        lines = "".join(f"{shard.sha256} {shard.tokens}\n" for shard in self.shards)
        return hashlib.sha256(f"{self.dtype}\n{lines}".encode()).hexdigest()


def read_index(folder: Path) -> TokenIndex:
    """The index of ``folder``, whose files are all there and as long as it says.

    Raises:
        TokenShardError: They are not; it says what is wrong.
    """
    try:
        index = TokenIndex.model_validate_json((folder / INDEX_NAME).read_bytes())
    except FileNotFoundError:
        raise TokenShardError(
            f"{folder} has no {INDEX_NAME}; `meshloom data tokenize` makes one"
        ) from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise TokenShardError(f"{folder / INDEX_NAME}: {place}: {fault['msg']}") from None
    for shard in index.shards:
        expected = shard.tokens * TOKEN_BYTES[index.dtype]
        path = folder / shard.file
        found = path.stat().st_size if path.exists() else None
        if found != expected:
            has = "is missing" if found is None else f"has {found:,} bytes"
            raise TokenShardError(f"{path} {has}; the index says {expected:,} bytes")
    if index.largest >= index.vocabulary:
        raise TokenShardError(
            f"{folder / INDEX_NAME}: largest: {index.largest} is not a token of a vocabulary of "
            f"{index.vocabulary}"
        )
    return index


def check_content(folder: Path, index: TokenIndex) -> None:
    """Reads all files of ``folder``.

    Raises:
        TokenShardError: One does not hold what was written there.
    """
    for shard in index.shards:
        with (folder / shard.file).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard.sha256:
            raise TokenShardError(
                f"{folder / shard.file} has SHA-256 {found}; the index says {shard.sha256}: it was changed "
                "since it was written, so tokenize the text again"
            )


def end_token(folder: Path) -> str | None:
    """The token that ends a text, as the configuration of the tokenizer in ``folder`` names it.

    Raises:
        ValueError: That is no JSON object; it says which file.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        found = _json_object(file) if file.is_file() else {}
        token = found.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    # Other than JSON says: no text of Unicode, or nested too deep.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: no JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: no JSON object, but {type(found).__name__}")  # noqa: TRY004 as of other content
    return found
