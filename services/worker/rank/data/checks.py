"""What in a batch made a step fail, said in terms of the data."""

import re
from collections.abc import Mapping
from contextlib import suppress
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
    tokens, embedded = _tokens(batch), embedded_tokens(model)
    if tokens is not None and embedded is not None and tokens.numel():
        beyond = (tokens >= embedded).reshape(len(tokens), -1).any(1)
        if beyond.any():
            raise VocabularyError(
                f"data: token {int(tokens.max())} has no place in the model's embedding of {embedded} "
                f"tokens (first in {feed.origin(step, int(beyond.int().argmax()))}); model.args must "
                "give the model as many tokens as the data's tokenizer has"
            ) from error
    if isinstance(error, RuntimeError) and re.search(r"\bd?type\b", str(error)):
        raise UnfitBatchError(
            f"data: the model does not take the batch of step {step}, {shapes}: {error}; have the data "
            "set give the dtypes that the model computes with, as float32 for pictures"
        ) from error
    error.add_note(f"data: this rank's batch of step {step} is {shapes}")


def embedded_tokens(model: nn.Module) -> int | None:
    """How many tokens ``model`` embeds; None: it has no embedding.

    Where it does not say which of its embeddings is that of tokens, the largest counts: then no
    batch is refused that it could take.
    """
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    said = getattr(model, "get_input_embeddings", None)
    if callable(said):
        # Models of transformers have the method also where they cannot answer.
        with suppress(NotImplementedError, AttributeError):
            found: object = said()
            tables = [found] if isinstance(found, nn.Embedding) else tables
    return max((table.num_embeddings for table in tables), default=None)


def described(batch: Batch) -> str:
    """Kinds and shapes of a batch, in words."""
    nested = map_tensors(
        lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}", batch
    )
    return f"{nested}".replace("'", "")


def not_finite(batch: Batch, feed: Feed, step: int) -> str | None:
    """The first sample of this rank's share of ``step`` that has no finite numbers, in words."""
    found = None
    for tensor in tensors_of(batch):
        if tensor.is_floating_point() and tensor.ndim:
            bad = ~tensor.isfinite().reshape(len(tensor), -1).all(1)
            if bad.any():
                place = int(bad.int().argmax())
                found = place if found is None else min(found, place)
    return None if found is None else feed.origin(step, found)


def _tokens(batch: Batch) -> torch.Tensor | None:
    if isinstance(batch, Mapping):
        batch = batch.get(_TOKENS)
        is_ids = isinstance(batch, torch.Tensor) and not batch.is_floating_point()
        return batch if is_ids else None
    return batch if predicted_tokens(batch) is not None else None
