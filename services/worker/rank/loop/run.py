"""What a rank trains with: everything that the loop needs, built whole."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fsdp_core import fully_shard, observe
from services.contract.messages.rank_pipe import LossUnit, RankSeat
from services.contract.plans import default_micro_batch
from services.contract.specs import JobSpec
from services.worker.rank import registry
from services.worker.rank.checkpoints.state import TrainedParts
from services.worker.rank.data.batches import predicted_tokens
from services.worker.rank.data.source import DataMismatchError, Feed, feed_of, sample_length
from services.worker.rank.gang.groups import Gang
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.models.loss import Loss, loss_of
from services.worker.rank.models.materialise import sharded_model
from services.worker.rank.models.protocol import HasFirstValues
from services.worker.rank.optim.schedules import Schedule
from services.worker.rank.seeds import derive


class BatchError(ValueError):
    """An attempt of another size than the spec's cannot share out the global batch evenly."""


@dataclass(frozen=True)
class Run:
    """The parts of a training run on one rank.

    Attributes:
        spec: The job.
        gang: The ranks.
        model: Sharded, with values.
        loss: Of a batch, by ``model``.
        optimizer: Over the sharded parameters.
        base_rates: Learning rate of each of its groups before the schedule.
        schedule: Factor by step.
        data: This rank's share of each step.
        micro_batch: Samples of one forward and backward pass.
        counts_tokens: Whether throughput is counted in tokens; else in samples.
        watch: Tells the board.
    """

    spec: JobSpec
    gang: Gang
    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    base_rates: tuple[float, ...]
    schedule: Schedule
    data: Feed
    micro_batch: int
    counts_tokens: bool
    watch: BoardWatch

    @property
    def loss_unit(self) -> LossUnit:
        """Nats where the loss is that of the next token."""
        chosen = self.spec.loss
        is_next_token = self.counts_tokens if chosen is None else chosen.factory == "next_token"
        return "nats" if is_next_token else ""

    @property
    def trained(self) -> TrainedParts:
        """What a checkpoint of it holds."""
        return TrainedParts(
            self.model,
            self.optimizer,
            self.gang,
            self.data.digest,
            self.spec.train.seed,
            self.model.first_values.files if isinstance(self.model, HasFirstValues) else {},
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the engine's units in the order of its unit indices; the root is first."""
        names: dict[object, list[str]] = {}
        for name, module in self.model.named_modules():
            state = fully_shard.state(module)
            if state is not None:
                names.setdefault(state, []).append(name or "root")
        return tuple(", ".join(fqns) for fqns in names.values())


def build(seat: RankSeat, gang: Gang, watch: BoardWatch) -> Run:
    """Builds model, optimizer, schedule and data as the seat's spec and plan say.

    Raises:
        FactoryError: The spec names no factory, or arguments that it does not take.
        BatchError: The global batch does not divide by the number of ranks.
        DataMismatchError: The ranks see different data.
    """
    spec = seat.spec
    if spec.train.global_batch % gang.data_ranks:
        raise BatchError(
            f"train.global_batch: {spec.train.global_batch} does not divide by the "
            f"{gang.data_ranks} data-parallel ranks of this attempt"
        )
    grant = registry.Grant(seat.secrets, tuple(map(Path, seat.data_roots)))
    make = functools.partial(registry.create, "model", spec.model, grant=grant)
    marked = _with_mark(make, registry.find("model", spec.model.factory))
    watch.memory.begin_model()
    model = sharded_model(marked, seat.plan.sharding, gang, spec.train.seed)
    observe(model, watch)
    optimizer: torch.optim.Optimizer = registry.create(
        "optimizer", spec.optimizer, list(model.named_parameters()), grant=grant
    )
    schedule: Schedule = registry.create(
        "schedule", spec.schedule, offered={"steps": spec.train.steps}, grant=grant
    )
    with watch.memory.apart():
        made = registry.create("data", spec.data, offered={"seed": spec.train.seed}, grant=grant)
        data = feed_of(made, spec.train.global_batch // gang.data_ranks, gang.data_rank)
    if not gang.control.agree_on(_fingerprint(data.digest)):
        raise DataMismatchError(
            f"data: rank {gang.rank} has data of digest {data.digest}, another rank has other "
            "data: all nodes of a job need the same files (for stdlib_bytes: the same Python)"
        )
    if gang.rank == 0 and (manifest := data.manifest) is not None:
        with contextlib.suppress(
            PermissionError
        ):  # ranks of a user of their own may not write there
            (Path(seat.log_folder) / "data.sha256").write_text(manifest)
    sample = data.sample()
    # From here on the ranks differ: dropout must not drop the same places on all of them. Those
    # of one tp group compute one thing together, so they must agree.
    torch.manual_seed(derive(spec.train.seed, "rank", gang.data_rank))
    return Run(
        spec=spec,
        gang=gang,
        model=model,
        loss=loss_of(model, registry.chosen_loss(spec, grant)),
        optimizer=optimizer,
        base_rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
        schedule=schedule,
        data=data,
        micro_batch=(
            default_micro_batch(spec.train.global_batch // gang.data_ranks, sample_length(sample))
            if spec.train.micro_batch == "auto"
            else spec.train.micro_batch
        ),
        counts_tokens=predicted_tokens(sample) is not None,
        watch=watch,
    )


def _fingerprint(digest: str) -> bytes:
    # A user's digest has any length, and what the ranks compare must have one.
    return hashlib.sha256(digest.encode()).digest()


def _with_mark(make: Callable[[], object], factory: object) -> Callable[[], object]:
    if getattr(factory, "meta_init", False):
        vars(make)["meta_init"] = True
    return make
