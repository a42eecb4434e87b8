"""The first samples of a job: whether its model can be trained on them.

What looks wrong need not be: a model may take numbers that are not finite for missing ones, or hash its
tokens. So a pass with values decides, and nothing is refused that a rank could train on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from meshloom.data import Batch
from services.worker.rank.data.batches import map_tensors, tensors_of
from services.worker.rank.data.checks import (
    Doubt,
    beyond_embedding,
    described,
    embedded_tokens,
    not_finite,
    tokens_of,
    too_few,
)
from services.worker.rank.data.source import DataError, Feed
from services.worker.rank.process.host_memory import lacks_host_memory

_MOST: Final = 16
_DOUBLES: Final = (
    "data: the batches are float64, which the model does not take, {batch}; have the data set give "
    "the dtypes that the model computes with, such as float32"
)


class SampleError(DataError):
    """The model cannot be trained on samples of the data."""


@dataclass(frozen=True)
class FirstSamples:
    """What is looked at.

    Attributes:
        batch: The samples.
        names: Of each, in words.
        tokenizer_size: How many tokens there may be in others; None: it is not known.
        is_cast: Whether the engine casts them to what it computes with.
    """

    batch: Batch
    names: tuple[str, ...]
    tokenizer_size: int | None
    is_cast: bool

    @classmethod
    def of(cls, feed: Feed, of_a_rank: int, *, is_cast: bool) -> "FirstSamples":
        """Those of a feed.

        Args:
            feed: Of one rank.
            of_a_rank: How many the ranks of the job take at once, at least: so many make one batch.
            is_cast: Whether the engine casts what the model is called with.
        """
        count = max(1, min(_MOST, of_a_rank))
        batch = feed.sample(count)
        names = tuple(feed.origin(1, place) for place in range(count))
        return cls(batch, names, feed.tokenizer_size, is_cast)


def check(first: FirstSamples, model: nn.Module, train: Callable[[Batch], torch.Tensor]) -> None:
    """Has the model train on samples that it may not take.

    Args:
        first: The samples.
        model: Built in any way; it is only looked at.
        train: From a batch to its loss, by a model with values.

    Raises:
        SampleError: The loss is no number, or there is none.
    """
    for batch, said in _doubts(first, model):
        try:
            loss = train(batch)
        except Exception as error:
            if isinstance(error, OSError | torch.OutOfMemoryError) or lacks_host_memory(error):
                continue  # says nothing of a rank
            raise SampleError(said) from error
        if not loss.isfinite().all():
            raise SampleError(f"{said}; the loss of it is {float(loss)}")


def _doubts(first: FirstSamples, model: nn.Module) -> Iterator[tuple[Batch, str]]:
    batch, embedded = first.batch, embedded_tokens(model)
    for doubt in (not_finite(batch), beyond_embedding(batch, model)):
        if doubt is not None:
            yield batch, _told(doubt, first.names)
    # Tensors without values are taken for those of the other dtype, so following the model shows nothing.
    has_doubles = any(each.dtype == torch.float64 for each in tensors_of(batch))
    computes_so = any(each.dtype == torch.float64 for each in model.parameters())
    if has_doubles and not computes_so and not first.is_cast:
        yield batch, _DOUBLES.format(batch=described(batch))
    said = too_few(first.tokenizer_size, embedded)
    if said is not None and first.tokenizer_size is not None:
        yield _with_token(batch, first.tokenizer_size - 1), said


def _told(doubt: Doubt, names: tuple[str, ...]) -> str:
    return doubt.said.format(sample=names[doubt.place])


def _with_token(batch: Batch, token: int) -> Batch:
    """The batch with that token at the beginning of the first sample."""
    changed = tokens_of(batch)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not changed:
            return tensor
        tensor = tensor.clone()
        tensor.view(-1)[0] = token
        return tensor

    return map_tensors(put, batch)
