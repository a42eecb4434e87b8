"""What ``train_batch`` and ``eval_batch`` see of the loop, and what they may do in it."""

import math
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from fsdp_core import clip_grad_norm_, torch_private
from meshloom.data import Batch
from meshloom.trainable import Models
from services.contract.words.states import RankPhase
from services.worker.rank.loop.parts import TrainableError
from services.worker.rank.loop.run import Run
from services.worker.rank.optim.several import parameters_of


class NonFiniteLossError(ArithmeticError):
    """Loss or gradients are infinite or not numbers; all ranks see it at the same step."""


class LoopContext:
    """A ``meshloom.trainable.Context``.

    Args:
        run: Its parts.
        step: Number of the step, from 1.
        before_update: Called before parameters and the optimizers' state change; None: this is an
            evaluation, in which nothing does.
    """

    def __init__(self, run: Run, step: int, before_update: Callable[[], None] | None) -> None:
        self._run = run
        self._before_update = before_update
        self._norms: list[float] = []
        self.step_number = step
        self.has_overflowed = False
        self.has_called_loss = False

    @property
    def is_training(self) -> bool:
        """Whether this is a step."""
        return self._before_update is not None

    @property
    def models(self) -> Models:
        """The models, sharded."""
        return self._run.models.by_name

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self._run.gang.device

    @property
    def norm(self) -> float:
        """Of all gradients with which something was updated; NaN if some overflowed."""
        if self.has_overflowed:
            return math.nan
        return self._norms[0] if len(self._norms) == 1 else math.hypot(*self._norms)

    def loss(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The loop's own loss of a batch, and metrics."""
        self.has_called_loss = True
        computed = (self._run.loss if self.is_training else self._run.evaluated_loss)(batch)
        return {**computed.metrics, "loss": computed.loss}

    def backward(self, loss: torch.Tensor, *, into: str | None = None) -> None:
        """Goes backward from ``loss``."""
        self._refuse_unless_steps_itself("backward")
        if not self.is_training:
            return
        aside: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        if into is not None:
            (chosen,) = self._run.optimizers.named(into)
            others = [each for each in self._run.optimizers.named(None) if each is not chosen]
            # Not the models' parameters: those that are gathered now hang there whole.
            aside = [(each, each.grad) for other in others for each in parameters_of(other)]
            for parameter, _ in aside:
                parameter.grad = None
        self.go_backward(loss)
        for parameter, gradient in aside:
            parameter.grad = gradient

    def step(self, optimizer: str | None = None) -> None:
        """Clips, updates and drops the gradients of an optimizer's parameters."""
        self._refuse_unless_steps_itself("step")
        if self.is_training:
            self.update(optimizer)

    def go_backward(self, loss: torch.Tensor) -> None:
        """Goes backward from the scaled loss."""
        scaler = self._run.scaler
        scaled = loss if scaler is None else loss.float() * scaler.now.scale
        scaled.backward()  # type: ignore[no-untyped-call]  # PyTorch's

    def update(self, name: str | None, check: Callable[[], None] | None = None) -> None:
        """Clips by one norm, then updates, unless gradients overflowed in fp16.

        Args:
            name: Of an optimizer; None: all.
            check: Called once the norm is known, and before anything is updated.

        Raises:
            NonFiniteLossError: The norm is not finite, without a scaler to blame.
        """
        run, scaler = self._run, self._run.scaler
        run.watch.enter(RankPhase.OPTIMIZER)
        optimizers = run.optimizers.named(name)
        run.models.reshard()
        parameters = (
            list(run.model.parameters())
            if name is None
            else [parameter for each in optimizers for parameter in parameters_of(each)]
        )
        limit = math.inf if run.spec.train.clip_norm is None else run.spec.train.clip_norm
        scale = 1.0 if scaler is None else scaler.now.scale
        norm = float(clip_grad_norm_(parameters, limit * scale)) / scale
        if check is not None:
            check()
        if not math.isfinite(norm) and scaler is None:
            # An update by it would poison every parameter, and the next checkpoint with them.
            raise NonFiniteLossError(f"the gradient norm of step {self.step_number} is {norm}")
        run.optimizers.set_rates(run.schedule(self.step_number))
        if self._before_update is not None:
            self._before_update()
        if not math.isfinite(norm):
            self.has_overflowed = True
        else:
            self._norms.append(norm)
            _multiply_gradients(parameters, 1.0 / scale)
            for each in optimizers:
                each.step()
        for each in optimizers:
            each.zero_grad()
        if not run.trainable.steps_itself:
            # Those of parameters that no optimizer has would add up, and count in each later norm.
            for parameter in parameters:
                parameter.grad = None

    def _refuse_unless_steps_itself(self, called: str) -> None:
        trainable = self._run.trainable
        if not trainable.steps_itself:
            raise TrainableError(
                f"{type(trainable).__name__}.train_batch called context.{called}, but the loop does "
                "that itself, unless the class sets steps_itself = True"
            )


def _multiply_gradients(parameters: list[torch.nn.Parameter], factor: float) -> None:
    if factor == 1.0:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if local.numel() > 0:
                    by_device.setdefault(local.device, []).append(local)
        for device, gradients in by_device.items():
            torch_private.foreach_scale(gradients, torch.tensor(factor, device=device))
