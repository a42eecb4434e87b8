"""The loss of a batch: the model's own, a built-in one, or the user's callable.

What the model is called with follows from the batch: a mapping gives the keywords that ``forward``
takes, a tuple all but its last element (the target), anything else itself.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from fsdp_core import register_fsdp_forward_method
from meshloom.data import Batch
from services.worker.rank.data.batches import predicted_tokens
from services.worker.rank.models.protocol import LossModel

_MASKED: Final = -100
_TARGETS: Final = ("labels", "label", "target", "targets", "y")


class LossError(TypeError):
    """A batch or a model's output does not go with the loss."""


@dataclass(frozen=True)
class Computed:
    """Of one batch: the mean ``loss``, a scalar to go backward from, and the user's ``metrics``."""

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


class UserLoss(Protocol):
    """A loss factory's product: from the model's output and the batch to a scalar or a dict."""

    def __call__(self, output: Any, batch: Batch) -> torch.Tensor | Mapping[str, torch.Tensor]:  # noqa: ANN401 (whatever the model gives)
        """The mean loss over the batch; a dict has it as ``loss``, the rest are metrics."""
        ...


class UserMetrics(Protocol):
    """What ``evaluation.metrics`` names: from the model's output and the batch to numbers by name."""

    def __call__(self, output: Any, batch: Batch) -> Mapping[str, torch.Tensor | float]:  # noqa: ANN401 (whatever the model gives)
        """Each the mean over the batch."""
        ...


Loss = Callable[[Batch], Computed]


def loss_of(
    model: nn.Module, chosen: UserLoss | None = None, measured: UserMetrics | None = None
) -> Loss:
    """A function from a batch to its loss by ``model``.

    Args:
        model: Sharded. Without ``chosen``, its method ``loss(batch)`` is called if it has one, with
            parameters gathered around it as around ``forward``; else ``.loss`` of its output counts;
            else the batch must be int64 tokens ``[samples, length + 1]``, and the mean cross entropy
            of the next token is taken.
        chosen: What the spec's ``loss`` makes.
        measured: What is measured of the output, for metrics beside those of the loss.

    Raises:
        LossError: There is nothing to measure: the model computes its loss without an output.
    """
    if chosen is None and isinstance(model, LossModel):
        if measured is not None:
            raise LossError(
                f"evaluation.metrics: {type(model).__name__} computes its loss itself, by its method "
                "loss, so there is no output to measure; return the metrics from it, beside the loss"
            )
        register_fsdp_forward_method(model, "loss")
        own = cast("Callable[[Batch], Any]", model.loss)
        return lambda batch: checked(own(batch))
    by_output = _by_output(model) if chosen is None else _by_choice(model, chosen)

    def computed(batch: Batch) -> Computed:
        output, loss = by_output(batch)
        found = checked(loss)
        if measured is None:
            return found
        return replace(found, metrics={**found.metrics, **_measured(measured, output, batch)})

    return computed


def _measured(measured: UserMetrics, output: object, batch: Batch) -> Mapping[str, torch.Tensor]:
    with torch.no_grad():
        found: object = measured(output, batch)
    if (
        not isinstance(found, Mapping)
        or "loss" in found
        or any(torch.as_tensor(each).numel() != 1 for each in found.values())
    ):
        raise LossError(
            "evaluation.metrics: it must return a dict of numbers by name, each the mean over the batch, "
            f"and none of them called 'loss'; this is {_shown(found)}"
        )
    return {str(name): torch.as_tensor(value).reshape(()) for name, value in found.items()}


def _shown(found: object) -> str:
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}"
    shapes = {name: list(torch.as_tensor(value).shape) for name, value in found.items()}
    return f"a dict of shapes {shapes}"


def _by_output(model: nn.Module) -> Callable[[Batch], tuple[Any, Any]]:
    """From a batch to the model's output and the loss in it."""
    takes = _parameters(model)

    def computed(batch: Batch) -> tuple[Any, Any]:
        if isinstance(batch, torch.Tensor) and predicted_tokens(batch) is not None:
            output = model(batch[:, :-1])
            loss = getattr(output, "loss", None)
            return output, next_token(output, batch) if loss is None else loss
        output = _called(model, batch, takes)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise LossError(
                f"loss: {type(model).__name__} has no method loss(batch), and its output (a "
                f"{type(output).__name__}) has no loss; name one in the spec: loss: {{factory: "
                "cross_entropy}, next_token, mse, bce_with_logits, or package.module:callable"
            )
        return output, loss

    return computed


def _by_choice(model: nn.Module, chosen: UserLoss) -> Callable[[Batch], tuple[Any, Any]]:
    """From a batch to the model's output and the chosen loss of it."""
    takes = _parameters(model)
    predicts_tokens = getattr(chosen, "func", chosen) is next_token

    def computed(batch: Batch) -> tuple[Any, Any]:
        is_cut = predicts_tokens and isinstance(batch, torch.Tensor)
        output = model(batch[:, :-1]) if is_cut else _called(model, batch, takes)
        return output, chosen(output, batch)

    return computed


def _called(model: nn.Module, batch: Batch, takes: frozenset[str] | None) -> Any:  # noqa: ANN401 (whatever the model gives)
    if isinstance(batch, Mapping):
        return model(**{k: v for k, v in batch.items() if takes is None or k in takes})
    if isinstance(batch, list | tuple):
        inputs = batch[:-1] if len(batch) > 1 else batch
        return model(*inputs)
    return model(batch)


def _parameters(model: nn.Module) -> frozenset[str] | None:
    """Names of what ``forward`` takes; None: any keyword."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def checked(result: object) -> Computed:
    """What a loss function gave, as loss and metrics.

    Raises:
        LossError: That is neither one number nor a dict with one as ``loss``.
    """
    metrics: dict[str, torch.Tensor] = {}
    if isinstance(result, Mapping):
        metrics = {
            str(name): value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
            for name, value in result.items()
            if name != "loss"
        }
        result = result.get("loss")
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise LossError(
            f"loss: it must be one number, the mean over the batch, or a dict with it as 'loss'; "
            f"this is {shape}"
        )
    return Computed(result.reshape(()) if result.ndim else result, metrics)


# -- Built-in losses: each takes the model's output and the batch


def next_token(output: Any, batch: Batch) -> torch.Tensor:  # noqa: ANN401 (a tensor, or an object that has it)
    """Mean cross entropy of the next token, in nats: see ``_predictions``."""
    logits, targets = _predictions(output, batch)
    # In fp32 whatever the model's precision: the sum over a vocabulary is long.
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _predictions(output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 (as above)
    """Logits ``[samples, length, vocab]`` and the tokens that they should predict.

    Args:
        output: Logits ``[samples, length, vocab]``, or an object with them as ``logits``.
        batch: int64 tokens ``[samples, length + 1]``, or a mapping with ``input_ids`` ``[samples,
            length]`` and, if some do not count, ``labels`` of that shape with -100 there.
    """
    logits = _logits(output)
    if isinstance(batch, Mapping):
        tokens = batch.get("labels", batch["input_ids"])
        logits, targets = logits[:, :-1], tokens[:, 1:]
    else:
        targets = batch[:, 1:]
    return logits, targets


def cross_entropy(output: Any, batch: Batch) -> dict[str, torch.Tensor]:  # noqa: ANN401 (as above)
    """Mean cross entropy of classes ``[samples]`` by logits ``[samples, classes]``, and ``accuracy``."""
    logits, target = _logits(output), _target(batch)
    hits = (logits.detach().argmax(1) == target).float().mean()
    return {"loss": functional.cross_entropy(logits.float(), target), "accuracy": hits}


def mse(output: Any, batch: Batch) -> torch.Tensor:  # noqa: ANN401 (as above)
    """Mean squared difference of output and target, which have as many elements."""
    predicted, target = _logits(output), _target(batch)
    return functional.mse_loss(predicted.float().reshape(target.shape), target.float())


def bce_with_logits(output: Any, batch: Batch) -> torch.Tensor:  # noqa: ANN401 (as above)
    """Mean binary cross entropy of targets in 0..1 by logits; both have as many elements."""
    logits, target = _logits(output), _target(batch)
    return functional.binary_cross_entropy_with_logits(
        logits.float().reshape(target.shape), target.float()
    )


# -- Built-in metrics: the same


def accuracy(output: Any, batch: Batch) -> dict[str, torch.Tensor]:  # noqa: ANN401 (as above)
    """``accuracy``: the part of samples whose class has the largest of the logits."""
    return {"accuracy": (_logits(output).argmax(1) == _target(batch)).float().mean()}


def next_token_accuracy(output: Any, batch: Batch) -> dict[str, torch.Tensor]:  # noqa: ANN401 (as above)
    """``accuracy``: the part of tokens, of those that count, that have the largest of the logits."""
    logits, targets = _predictions(output, batch)
    counts = targets != _MASKED
    return {"accuracy": (logits.argmax(2) == targets)[counts].float().mean()}


def _logits(output: Any) -> torch.Tensor:  # noqa: ANN401 (whatever the model gives)
    found = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(found, "logits", found)
    if not isinstance(found, torch.Tensor):
        raise LossError(f"loss: the model gave a {type(output).__name__}, not a tensor of logits")
    return found


def _target(batch: Batch) -> torch.Tensor:
    found: object = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _TARGETS if name in batch), None)
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[-1]
    if not isinstance(found, torch.Tensor):
        raise LossError(
            "loss: a built-in loss finds the target as the last element of a tuple, or in a mapping "
            f"as one of {', '.join(_TARGETS)}; this batch is a {type(batch).__name__}"
        )
    return found
