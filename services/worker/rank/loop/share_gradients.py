"""Gradients of the parts of a step that a replica computes, summed in one tensor on the host.

The global batch has a share for each replica of the plan. Who lives computes its own share, and a part of each
share whose replica is absent; so sums over all members are those of the undisturbed run, but for the
order of addition. Each part is weighed by its samples. What is random in a part follows from the job's
seed, the step, the share and the part, so it is the same whoever computes it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import FSDPModule
from meshloom.data import Batch
from services.worker.rank.checkpoints.random_state import seed_random
from services.worker.rank.data import batches
from services.worker.rank.data.checks import explain
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import DataError, Feed
from services.worker.rank.loop.context import LoopContext
from services.worker.rank.loop.parts import TrainableError
from services.worker.rank.loop.run import Run
from services.worker.rank.models.loss import checked
from services.worker.rank.seeds import derive


@dataclass(frozen=True)
class Part:
    """Samples ``first`` to ``last`` (exclusive), of each rank, of a replica's share."""

    share: int
    first: int
    last: int


def parts_taken_over(
    members: Sequence[int], replica: int, replicas: int, per_rank: int
) -> tuple[Part, ...]:
    """What ``replica`` computes beside its own share: its parts of the shares of absent ones.

    Args:
        members: Replicas that are present, ascending.
        replica: One of them.
        replicas: How many shares there are.
        per_rank: Samples of a share on each rank.
    """
    count = len(members)
    taken = []
    for share in sorted(set(range(replicas)).difference(members)):
        place = (members.index(replica) + share) % count
        first, last = per_rank * place // count, per_rank * (place + 1) // count
        if first < last:
            taken.append(Part(share, first, last))
    return tuple(taken)


@dataclass(frozen=True)
class Sums:
    """Sums over parts; those of all members together are those of the step.

    Attributes:
        gradients: Of all trainable parameters in the model's order, one after the other, and then for
            each whether it has one.
        names: Of the metrics.
        figures: The loss, the metrics, and how many tokens or samples there were.
        data_wait_s: How long data was waited for.
    """

    gradients: torch.Tensor
    names: tuple[str, ...]
    figures: torch.Tensor
    data_wait_s: float

    def __add__(self, other: "Sums") -> "Sums":
        """In tensors of its own."""
        return Sums(
            self.gradients + other.gradients,
            self.names,
            self.figures + other.figures,
            self.data_wait_s + other.data_wait_s,
        )

    def copy(self) -> "Sums":
        """In tensors of its own."""
        return Sums(self.gradients.clone(), self.names, self.figures.clone(), self.data_wait_s)


@runtime_checkable
class _Divisible(Protocol):
    def of_share(self, share: Share) -> Feed: ...


class ShareGradients:
    """Computes them.

    Args:
        run: Of a replica.

    Raises:
        TrainableError: The trainable steps itself.
        DataError: The data cannot be computed by another rank than the one whose it is.
    """

    def __init__(self, run: Run) -> None:
        if run.trainable.steps_itself:
            raise TrainableError(
                "faults.on_replica_loss: continue is not possible with a trainable that steps itself"
            )
        if run.weighs_tokens:
            raise DataError(
                "faults.on_replica_loss: continue is not possible with labels that mask tokens: all "
                "samples must weigh the same"
            )
        if not isinstance(run.data, _Divisible):
            raise DataError(
                "faults.on_replica_loss: continue needs data that is read by its place: a map-style "
                "data set or a meshloom.DataSource, no stream"
            )
        self._run = run
        self._data: _Divisible = run.data
        gang = run.gang
        self.per_rank = run.spec.train.global_batch // (gang.data_ranks * gang.replicas)
        self._position: tuple[int, Mapping[str, Any]] | None = None
        self._feeds: dict[int, Feed] = {}

    def of_own_share(self, step: int, before_update: Callable[[], None]) -> Sums:
        """Of this replica's own share, for which its feed goes on by a step."""
        gang = self._run.gang
        self._position = (step, self._run.data.state())
        began = time.perf_counter()
        batch = self._run.data.share(step)
        waited_s = time.perf_counter() - began
        part = Part(gang.replica, 0, self.per_rank)
        return self._summed(step, [(part, batch)], waited_s, before_update)

    def of_others(
        self, step: int, parts: Sequence[Part], before_update: Callable[[], None]
    ) -> Sums:
        """Of parts of other shares of the step whose own share was taken last."""
        began = time.perf_counter()
        given = [(part, self._batch_of(part, step)) for part in parts]
        return self._summed(step, given, time.perf_counter() - began, before_update)

    def position_after(self, made: int) -> Mapping[str, Any]:
        """In the data after ``made`` steps: the last one, or the one before, if its successor was read."""
        if self._position is not None and self._position[0] == made + 1:
            return self._position[1]
        return self._run.data.state()

    def set_gradients(self, sums: Sums) -> None:
        """Makes the mean over all shares the gradients of the parameters."""
        parameters = _trainable(self._run.model)
        sizes = [_local(parameter).numel() for parameter in parameters]
        *each, present = torch.split(sums.gradients, [*sizes, len(parameters)])
        with torch.no_grad():
            for parameter, flat, count in zip(parameters, each, present.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None
                    continue
                grad = torch.zeros_like(parameter)
                mean = flat.div_(self._run.gang.replicas)
                _local(grad).copy_(mean.view(_local(grad).shape))
                parameter.grad = grad

    def close(self) -> None:
        """Ends feeds of other shares."""
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    def _batch_of(self, part: Part, step: int) -> Batch:
        if self._position is None or self._position[0] != step:
            raise RuntimeError(f"the own share of step {step} was not taken yet")
        gang = self._run.gang
        if part.share not in self._feeds:
            place = part.share * gang.data_ranks + gang.data_rank
            share = Share(self.per_rank, place, gang.data_ranks * gang.replicas)
            self._feeds[part.share] = self._data.of_share(share)
        feed = self._feeds[part.share]
        feed.restore(self._position[1], step - 1)
        whole = feed.share(step)
        return batches.map_tensors(lambda tensor: tensor[part.first : part.last], whole)

    def _summed(
        self,
        step: int,
        given: Sequence[tuple[Part, Batch]],
        waited_s: float,
        before_update: Callable[[], None],
    ) -> Sums:
        run = self._run
        models = [cast("FSDPModule", each) for each in run.models.by_name.values()]
        context = LoopContext(run, step, before_update)
        passes = [
            (part, number, micro)
            for part, batch in given
            for number, micro in enumerate(
                batches.split(batches.moved(batch, run.gang.device), run.micro_batch)
            )
        ]
        figures: dict[str, torch.Tensor] = {}
        total = torch.zeros((), device=run.gang.device)
        counted = 0
        count = batches.predicted_tokens if run.counts_tokens else batches.rows
        for number, (part, place, micro) in enumerate(passes, start=1):
            words = (part.share, part.first, place, run.gang.data_rank)
            seed_random(derive(run.spec.train.seed, "part", step, *words))
            for model in models:
                model.set_requires_gradient_sync(number == len(passes))
            try:
                computed = checked(run.trainable.train_batch(micro, context))
            except Exception as error:
                explain(error, given[0][1], run.model, run.data, step)
                raise
            weight = batches.rows(micro) / self.per_rank
            context.go_backward(computed.loss * weight)
            total += computed.loss.detach() * weight
            for name, value in computed.metrics.items():
                weighed = value.detach().to(total) * weight
                figures[name] = figures[name] + weighed if name in figures else weighed
            counted += count(micro) or 0
        names = tuple(sorted(figures))
        values = [total, *(figures[name] for name in names), torch.tensor(float(counted))]
        own = torch.stack([value.detach().to("cpu", torch.float64) for value in values])
        return Sums(self._taken_gradients(), names, own, waited_s)

    def _taken_gradients(self) -> torch.Tensor:
        run = self._run
        run.models.reshard()
        parameters = _trainable(run.model)
        is_wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if is_wide else torch.float32
        flat, present = [], []
        for parameter in parameters:
            grad = parameter.grad
            present.append(float(grad is not None))
            local = _local(parameter if grad is None else grad).detach()
            flat.append((local * 0 if grad is None else local).reshape(-1).to("cpu", dtype))
            parameter.grad = None
        return torch.cat([*flat, torch.tensor(present, dtype=dtype)])


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
