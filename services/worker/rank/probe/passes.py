"""A pass of a model as a rank makes it: what a probe follows without values, or makes with some."""

from collections.abc import Mapping

import torch
from torch import nn

from meshloom.data import Batch
from services.contract.messages.probe_programs import ProbeSeat
from services.worker.rank import registry
from services.worker.rank.loop.parts import built_by_meta, trainable_of
from services.worker.rank.models.loss import UserLoss, checked, loss_of
from services.worker.rank.models.materialise import give_values
from services.worker.rank.models.protocol import LossModel
from services.worker.rank.models.several import ALONE, checked_module


def pass_for_real(batch: Batch, seat: ProbeSeat) -> torch.Tensor:
    """The loss of a forward pass with values.

    A loss that cannot be followed without values is none that fails in a rank.
    """
    spec = seat.question.spec
    trainable = trainable_of(spec, registry.Grant.of(seat))
    with torch.device("meta" if built_by_meta(spec, trainable) else "cpu"):
        model = checked_module(trainable.build_model())
    if any(each.is_meta for each in model.parameters()):
        model.to_empty(device="cpu")
        give_values(model, spec.train.seed)
    context = ProbeContext(model, registry.chosen_loss(spec, registry.Grant.of(seat)))
    with torch.no_grad():
        return checked(trainable.train_batch(batch, context)).loss


class ProbeContext:
    """What ``train_batch`` is given while its passes are looked at."""

    step_number = 1
    is_training = True

    def __init__(self, model: nn.Module, chosen: UserLoss | None) -> None:
        self._model = model
        self._chosen = chosen
        self.models = {ALONE: model}
        self.device = torch.device("cpu")

    def loss(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """As the loop computes it."""
        return {"loss": mean_loss(self._model, batch, self._chosen)}

    def backward(self, loss: torch.Tensor, *, into: str | None = None) -> None:
        """Whoever calls it was refused before."""

    def step(self, optimizer: str | None = None) -> None:
        """As above."""


def mean_loss(model: nn.Module, batch: Batch, chosen: UserLoss | None = None) -> torch.Tensor:
    """The loss as a rank computes it, with the root's hooks around it as the engine has them.

    Args:
        model: Not sharded.
        batch: As the data gives it.
        chosen: What the spec's ``loss`` makes.
    """
    if chosen is not None or not isinstance(model, LossModel):
        return loss_of(model, chosen)(batch).loss
    loss, forward = model.loss, vars(model).get("forward")

    def loss_as_forward(batch: Batch) -> torch.Tensor:
        # From here on forward is itself again, which the loss may call.
        del model.forward
        if forward is not None:
            model.forward = forward
        return checked(loss(batch)).loss

    model.forward = loss_as_forward
    computed: torch.Tensor = model(batch)
    return computed
