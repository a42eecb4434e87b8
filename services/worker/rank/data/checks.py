"""What in the data a model cannot train on, said in terms of the data."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from meshloom.data import Batch
from services.worker.rank.data.batches import map_tensors, predicted_tokens, tensors_of
from services.worker.rank.data.source import DataError, Feed

_TOKENS: Final = "input_ids"


class VocabularyError(ValueError):
    """The data has tokens for which the model has no embedding."""


class UnfitBatchError(DataError):
    """The model does not take a batch of this data."""


@dataclass(frozen=True)
class Doubt:
    """What is at fault if a model cannot be trained on a batch.

    Attributes:
        place: Of the first sample that has it.
        said: It, with ``{sample}`` in the place of that sample's name.
    """

    place: int
    said: str

    def told(self, feed: Feed, step: int) -> str:
        """It, of a batch that is this rank's share of ``step``."""
        return self.said.format(sample=feed.origin(step, self.place))


def explain(error: Exception, batch: Batch, model: nn.Module, feed: Feed, step: int) -> None:
    """Raises a clearer error than ``error`` where the batch is at fault; else adds to it what it had.

    Args:
        error: What the model, the loss or the loop raised.
        batch: This rank's share of ``step``, on the CPU.
        model: Whose embedding the tokens go through.
        feed: Where the batch is from.
        step: Its number.

    Raises:
        VocabularyError: A token has no embedding.
        UnfitBatchError: Numbers are of a dtype that the model does not compute with.
    """
    shapes = described(batch)
    if (doubt := beyond_embedding(batch, model)) is not None:
        raise VocabularyError(doubt.told(feed, step)) from error
    if isinstance(error, RuntimeError) and re.search(r"\bd?type\b", str(error)):
        raise UnfitBatchError(
            f"data: the model does not take the batch of step {step}, {shapes}: {error}; have the data "
            "set give the dtypes that the model computes with, such as float32 for images"
        ) from error
    error.add_note(f"data: this rank's batch of step {step} is {shapes}")


def check_tokenizer(size: int | None, model: nn.Module) -> None:
    """Before the first step: the model embeds all tokens, where it says which embedding is theirs.

    Args:
        size: How many the tokenizer has; None: it is not known.
        model: Any; one that does not say it may take tokens in another way.

    Raises:
        VocabularyError: It embeds fewer.
    """
    table = _said_table(model)
    if table is not None and (said := too_few(size, table.num_embeddings)) is not None:
        raise VocabularyError(said)


def too_few(size: int | None, embedded: int | None) -> str | None:
    """That a tokenizer has more tokens than are embedded, and what to do; None: it has not."""
    if size is None or embedded is None or size <= embedded:
        return None
    return (
        f"data.args: the tokenizer has {size} tokens, and the model embeds {embedded}; model.args must "
        f"give the model at least {size} (those of transformers by overrides: {{vocab_size: {size}}})"
    )


def beyond_embedding(batch: Batch, model: nn.Module) -> Doubt | None:
    """The largest token of a batch, if ``model`` has no embedding for it."""
    tokens, embedded = tokens_of(batch), embedded_tokens(model)
    if tokens is None or embedded is None or not tokens.numel():
        return None
    beyond = (tokens >= embedded).reshape(len(tokens), -1).any(1)
    if not beyond.any():
        return None
    return Doubt(
        int(beyond.int().argmax()),
        f"data: token {int(tokens.max())} is outside the model's embedding of {embedded} tokens "
        "(first in {sample}); model.args must give the model as many tokens as the data's tokenizer has",
    )


def embedded_tokens(model: nn.Module) -> int | None:
    """How many tokens ``model`` embeds; None: it has no embedding.

    Where it does not say which of its embeddings is that of tokens, the largest counts: then no
    batch is refused that it could take.
    """
    if (table := _said_table(model)) is not None:
        return table.num_embeddings
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return max((each.num_embeddings for each in tables), default=None)


def _said_table(model: nn.Module) -> nn.Embedding | None:
    """The embedding of tokens of a model that says which it is, as those of transformers do."""
    said = getattr(model, "get_input_embeddings", None)
    found: object = None
    # They have the method also where they cannot answer.
    with suppress(NotImplementedError, AttributeError):
        found = said() if callable(said) else None
    return found if isinstance(found, nn.Embedding) else None


def described(batch: Batch) -> str:
    """Kinds and shapes of a batch, in words."""
    nested = map_tensors(
        lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}", batch
    )
    return f"{nested}".replace("'", "")


def not_finite(batch: Batch) -> Doubt | None:
    """The first sample of a batch that has numbers which are not finite."""
    places = []
    for tensor in tensors_of(batch):
        if tensor.is_floating_point() and tensor.ndim:
            bad = ~tensor.isfinite().reshape(len(tensor), -1).all(1)
            if bad.any():
                places.append(int(bad.int().argmax()))
    said = "data: {sample} is the first with numbers that are not finite"
    return Doubt(min(places), said) if places else None


def tokens_of(batch: Batch) -> torch.Tensor | None:
    """The tokens of a batch; None: it has none that can be told from other numbers."""
    if isinstance(batch, Mapping):
        batch = batch.get(_TOKENS)
        is_ids = isinstance(batch, torch.Tensor) and not batch.is_floating_point()
        return batch if is_ids else None
    return batch if predicted_tokens(batch) is not None else None
