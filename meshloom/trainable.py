"""A class for training that parts by name cannot express.

``trainable: {factory: my_package.module:MyTrainable, args: {…}}`` in a spec, in place of ``model``.
Meshloom keeps the loop around it: sharding, data, accumulation, clipping, schedule, checkpoints,
evaluation.
"""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from meshloom.data import Batch

Loss = torch.Tensor | Mapping[str, Any]
"""The mean over a batch, a scalar; or a dict with it as ``loss``, and with metrics beside it."""

Models = Mapping[str, nn.Module]
"""By the names that ``build_model`` gave them; one that it returned alone is ``model``."""


class Context(Protocol):
    """What ``train_batch`` and ``eval_batch`` can read and call."""

    @property
    def step_number(self) -> int:
        """Number of the current step, from 1; in an evaluation, of the last one."""
        ...

    @property
    def is_training(self) -> bool:
        """Whether this is a training step; False in an evaluation."""
        ...

    @property
    def models(self) -> Models:
        """The models, sharded."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this rank; batches are on it."""
        ...

    def loss(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """What the loop computes by default: ``loss``, and metrics if there are some.

        It is the spec's ``loss`` of the output of the model, else the model's own, else the cross
        entropy of the next token. There must be one model.
        """
        ...

    def backward(self, loss: torch.Tensor, *, into: str | None = None) -> None:
        """Runs backward; gradients are the mean over ranks. Only with ``steps_itself``.

        Args:
            loss: A scalar, the mean over this rank's samples.
            into: Only the parameters of this optimizer keep the gradients: a generator's loss goes
                through the discriminator, which must not learn from it. None: all do.

        In an evaluation it does nothing.
        """
        ...

    def step(self, optimizer: str | None = None) -> None:
        """Clips the gradients of an optimizer's parameters, updates them, and drops the gradients.

        Only with ``steps_itself``; in an evaluation it does nothing.

        Args:
            optimizer: Its name; None: all of them, clipped by one norm.

        Raises:
            ArithmeticError: The norm is not finite. Nothing was changed.
        """
        ...


class Trainable(abc.ABC):
    """Defines what to train, and how to train one batch. Only ``build_model`` is required.

    It is made from ``trainable.args`` on every rank; what it does must be the same on all of them.
    """

    steps_itself: ClassVar[bool] = False
    """Whether ``train_batch`` calls ``context.backward`` and ``context.step``.

    It is then called once a step with all that this rank has of the global batch. Otherwise it is
    called for each micro-batch, and the loop goes backward, accumulates, clips and steps.
    """

    meta_init: ClassVar[bool] = False
    """Whether the models may be built on the meta device: a promise about ``reset_parameters``.

    Every module that directly owns parameters or buffers must have that method, which gives all of
    them their values. No rank then ever holds a whole model.
    """

    @abc.abstractmethod
    def build_model(self) -> nn.Module | Models:
        """The model, or several by name, not sharded.

        Several are sharded by the units of the plan whose patterns begin with their name, such as
        ``generator.blocks.*``; in checkpoints and logs their parameters have it in front.
        """

    def build_optimizer(
        self,
        models: Models,  # noqa: ARG002 (for those that override it)
    ) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None:
        """An optimizer, or several by name, over the parameters of ``models``, which are sharded by now.

        Each parameter belongs to one of them at most. The schedule's factor is multiplied with the
        ``lr`` of all their groups. None, the default: the spec's ``optimizer``, over all
        parameters.
        """
        return None

    def build_data(self) -> object:
        """What a data factory may return. None, the default: the spec's ``data``."""
        return None

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        """The loss of a batch, and metrics; by default ``context.loss(batch)``.

        Micro-batches weigh the same, but where a batch has ``input_ids`` and ``labels`` of one shape:
        there they weigh as many tokens as they predict, so the loss must be the mean over these.
        """
        return context.loss(batch)

    def eval_batch(self, batch: Batch, context: Context) -> Loss:
        """The loss of a batch of validation data, and metrics; by default that of ``train_batch``.

        Gradients are off, and the models in evaluation mode.
        """
        return self.train_batch(batch, context)

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold besides models, optimizers and data: nothing by default.

        Dicts and lists of tensors and JSON values. A DTensor is saved in slices, as parameters are;
        any other tensor must be the same on all ranks.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (may be left out)
        """Restores what ``state_dict`` returned, at any number of ranks.

        Tensors are on the CPU, but DTensors: these are those of ``state_dict()`` as it is now, filled
        with what was saved.
        """
