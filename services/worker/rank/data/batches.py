"""Batches: nested containers of tensors, each with the samples along its first dim."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from meshloom.data import Batch

_SEQUENCE_DIMS = 2


class BatchShapeError(ValueError):
    """The tensors of a batch have no common number of samples."""


def map_tensors(change: Callable[[torch.Tensor], Any], batch: Batch) -> Any:  # noqa: ANN401 (as nested as the batch)
    """``batch`` with each of its tensors changed; containers keep their kind and order."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(change, value) for key, value in batch.items()}
        return changed if type(batch) is dict else _of_kind(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(change, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [each.name for each in dataclasses.fields(batch) if each.init]
        found = {name: map_tensors(change, getattr(batch, name)) for name in fields}
        return dataclasses.replace(batch, **found)
    return batch


def _of_kind(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> object:
    """Mappings of libraries (of tokenizers, for one) are made from a dict; those that are not stay one."""
    try:
        return cast("Any", type(batch))(changed)
    except TypeError:
        return changed


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All tensors of ``batch``, in its order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return found


def rows(batch: Batch) -> int:
    """How many samples ``batch`` has.

    Raises:
        BatchShapeError: It has no tensor, or tensors of different first sizes.
    """
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors_of(batch)}
    if len(sizes) != 1 or None in sizes:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors_of(batch)) or "no tensor"
        raise BatchShapeError(
            "a batch needs tensors that all have the samples along their first dim; "
            f"this one has {shapes}"
        )
    return cast("int", sizes.pop())


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """Parts of ``batch`` with ``size`` samples each; the last may have fewer. They share its memory."""
    for start in range(0, rows(batch), size):
        yield map_tensors(lambda tensor, start=start: tensor[start : start + size], batch)  # type: ignore[misc]  # mypy cannot type a default in a lambda


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of the samples of all, which are nested alike."""
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(tensors_of(each) for each in batches), strict=True)
    whole = iter([torch.cat(column) for column in columns])
    return map_tensors(lambda _: next(whole), batches[0])


def zeros_like(sample: Batch, samples: int) -> Batch:
    """A batch of so many samples that are nested and shaped as the one given, all zeros."""
    return map_tensors(
        lambda tensor: torch.zeros(samples, *tensor.shape[1:], dtype=tensor.dtype), sample
    )


def moved(batch: Batch, device: torch.device) -> Batch:
    """``batch`` on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def predicted_tokens(batch: Batch) -> int | None:
    """How many tokens a model of language predicts on it; None: it is no batch of tokens.

    int64 ``[samples, length + 1]`` is given to the model without the last and compared without the
    first token of each sample. A mapping with ``input_ids`` counts the tokens that are not masked
    in ``labels`` by -100, each sample's first aside, as models of ``transformers`` compare them.
    """
    if isinstance(batch, torch.Tensor):
        is_tokens = batch.dtype == torch.int64 and batch.ndim == _SEQUENCE_DIMS
        # By arithmetic: an operator more would be seen by whoever counts those of a pass.
        return batch.shape[0] * (batch.shape[1] - 1) if is_tokens and batch.shape[1] > 1 else None
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.shape == batch["input_ids"].shape:
            return int((labels[:, 1:] != -100).sum())  # noqa: PLR2004 (cross entropy's own mark)
        return cast("int", batch["input_ids"].numel())
    return None


def counts_differ(batch: Batch) -> bool:
    """Whether parts of such a batch may predict different numbers of tokens: some may be masked."""
    if not isinstance(batch, Mapping) or predicted_tokens(batch) is None:
        return False
    labels = batch.get("labels")
    return isinstance(labels, torch.Tensor) and labels.shape == batch["input_ids"].shape
