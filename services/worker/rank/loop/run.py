"""What a rank trains with: everything that the loop needs, built whole."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from fsdp_core import TrainingState, observe
from fsdp_core.plan.model import ShardingPlan
from meshloom.trainable import Trainable
from services.contract.jobs.plans import default_micro_batch
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import LossUnit, RankSeat
from services.worker.rank import registry
from services.worker.rank.checkpoints.random_state import seed_random
from services.worker.rank.checkpoints.state import TrainedParts
from services.worker.rank.data.batches import counts_differ, predicted_tokens
from services.worker.rank.data.checks import check_tokenizer
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.samples import own_random_state, seed_all
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import DataMismatchError, Feed, sample_length
from services.worker.rank.gang.groups import Gang, own_mesh
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.early_stop import EarlyStop
from services.worker.rank.loop.parts import built_by_meta, made_data, trainable_of
from services.worker.rank.models.hugging_face import own_configuration
from services.worker.rank.models.loss import (
    Computed,
    Loss,
    LossError,
    UserLoss,
    UserMetrics,
    loss_of,
)
from services.worker.rank.models.materialise import sharded_models
from services.worker.rank.models.protocol import HasFirstValues
from services.worker.rank.models.several import Models
from services.worker.rank.optim.ema import Ema
from services.worker.rank.optim.groups import GroupError, by_patterns, check_options
from services.worker.rank.optim.loss_scale import LossScaler
from services.worker.rank.optim.optimizers import NOT_HIDDEN, is_hidden
from services.worker.rank.optim.schedules import Schedule
from services.worker.rank.optim.several import Optimizers
from services.worker.rank.seeds import derive


class BatchError(ValueError):
    """An attempt of another size than the spec's cannot share out the global batch evenly."""


@dataclass(frozen=True)
class Run:
    """The parts of a training run on one rank.

    Attributes:
        spec: The job.
        gang: The ranks.
        trainable: The user's, or one of the parts that the spec names.
        models: Sharded, with values.
        loss: Of a batch, where the trainable leaves it to the loop.
        evaluated_loss: The same in evaluations, with what the spec has measured there.
        optimizers: Over the sharded parameters.
        schedule: Factor by step.
        data: This rank's share of each step.
        micro_batch: Samples of one forward and backward pass.
        counts_tokens: Whether throughput is counted in tokens; else in samples.
        weighs_tokens: Whether micro-batches predict different numbers of tokens.
        scaler: Of losses, where anything is computed or reduced in fp16.
        ema: Averages of the weights, if the spec wants them.
        early_stop: By which evaluations may end the run, if the spec wants that.
        watch: Tells the board.
    """

    spec: JobSpec
    gang: Gang
    trainable: Trainable
    models: Models
    loss: Loss
    evaluated_loss: Loss
    optimizers: Optimizers
    schedule: Schedule
    data: Feed
    micro_batch: int
    counts_tokens: bool
    weighs_tokens: bool
    scaler: LossScaler | None
    ema: Ema | None
    early_stop: EarlyStop | None
    watch: BoardWatch

    @property
    def loss_unit(self) -> LossUnit:
        """Nats where the loss is that of the next token; what a user's ``train_batch`` gives has none."""
        if _trains_by_user(self.trainable):
            return ""
        chosen = self.spec.loss
        is_next_token = self.counts_tokens if chosen is None else chosen.factory == "next_token"
        return "nats" if is_next_token else ""

    @property
    def model(self) -> nn.Module:
        """The model; of several a container, which is never called."""
        return self.models.whole

    @property
    def trained(self) -> TrainedParts:
        """What a checkpoint of it holds."""
        return TrainedParts(
            self.model,
            tuple(self.optimizers.by_name.values()),
            self.gang,
            self.data.digest,
            self.spec.train.seed,
            beside=self.trainable,
            ema=self.ema,
            scaler=self.scaler,
            files=(
                self.model.first_values.files
                if isinstance(self.model, HasFirstValues)
                else own_configuration(self.model)
            ),
            data=self.data,
            early_stop=self.early_stop,
            first_values=tuple(self.optimizers.first_values.values()),
            is_changed_by_user=_trains_by_user(self.trainable),
            first_rates=(
                tuple(self.optimizers.base_rates.values()) if self.trainable.steps_itself else ()
            ),
        )

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the engine's units in the order of the board's unit indices."""
        return tuple(name for model in self.models.by_name for name in self.models.units(model))


def build(seat: RankSeat, gang: Gang, watch: BoardWatch) -> Run:
    """Builds models, optimizers, schedule and data as the seat's spec and plan say.

    Raises:
        FactoryError: The spec names no factory, or arguments that it does not take.
        TrainableError: A trainable is none, or gives no data where nothing else does.
        OptimizerError: What should make optimizers made something else.
        GroupError: A group of the optimizer's has no parameter.
        BatchError: The global batch does not divide by the number of ranks.
        VocabularyError: The data may have tokens that the model does not embed.
        DataMismatchError: The ranks see different data.
    """
    spec = seat.spec
    data_ranks = gang.data_ranks * gang.replicas
    if spec.train.global_batch % data_ranks:
        raise BatchError(
            f"train.global_batch: {spec.train.global_batch} does not divide by the "
            f"{data_ranks} data-parallel ranks of this attempt"
        )
    per_rank = spec.train.global_batch // data_ranks
    grant = registry.Grant.of(seat)
    trainable = trainable_of(spec, grant)
    make = _with_mark(trainable.build_model, is_meta=built_by_meta(spec, trainable))
    watch.memory.begin_model()
    sharding = replace(seat.plan.sharding, mesh=own_mesh(seat))
    models = sharded_models(make, sharding, gang, spec.train.seed, _owned_by(spec))
    _observe(models, watch)
    optimizers = _optimizers(spec, trainable, models, grant)
    schedule: Schedule = registry.create(
        "schedule", spec.schedule, offered={"steps": spec.train.steps}, grant=grant
    )
    ema = None if spec.train.ema is None else Ema(models.whole, spec.train.ema)
    # What draws as it is made, as samplers do, is the same on all ranks and in every attempt.
    with watch.memory.apart(), own_random_state():
        seed_all(derive(spec.train.seed, "data"))
        made = made_data(spec, trainable, grant)
        place = gang.replica * gang.data_ranks + gang.data_rank
        data = feed_of(made, Share(per_rank, place, data_ranks), spec.train.seed)
    check_tokenizer(data.tokenizer_size, models.whole)
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
    chosen, measured = registry.chosen_loss(spec, grant), registry.chosen_metrics(spec, grant)
    at_steps = spec.evaluation is not None and spec.evaluation.at_steps
    # From here on the ranks differ: dropout must not drop the same places on all of them. Those
    # of one tp group compute one thing together, so they must agree.
    seed_random(derive(spec.train.seed, "rank", gang.data_rank))
    return Run(
        spec=spec,
        gang=gang,
        trainable=trainable,
        models=models,
        loss=_loss(models, chosen, measured if at_steps else None),
        evaluated_loss=_loss(models, chosen, measured),
        optimizers=optimizers,
        schedule=schedule,
        data=data,
        micro_batch=(
            default_micro_batch(per_rank, sample_length(sample))
            if spec.train.micro_batch == "auto"
            else spec.train.micro_batch
        ),
        counts_tokens=predicted_tokens(sample) is not None,
        weighs_tokens=counts_differ(sample) and not trainable.steps_itself,
        scaler=LossScaler() if _computes_in_fp16(seat.plan.sharding) else None,
        ema=ema,
        early_stop=None if spec.train.early_stop is None else EarlyStop(spec.train.early_stop),
        watch=watch,
    )


def _trains_by_user(trainable: Trainable) -> bool:
    return type(trainable).train_batch is not Trainable.train_batch


def _fingerprint(digest: str) -> bytes:
    # A user's digest has any length, and what the ranks compare must have one.
    return hashlib.sha256(digest.encode()).digest()


def _with_mark(build: Callable[[], object], *, is_meta: bool) -> Callable[[], object]:
    make = functools.partial(build)
    if is_meta:
        vars(make)["meta_init"] = True
    return make


def _loss(models: Models, chosen: UserLoss | None, measured: UserMetrics | None) -> Loss:
    if models.is_one:
        return loss_of(models.whole, chosen, measured)

    def refused(_: object) -> Computed:
        raise LossError(
            f"loss: there are several models ({', '.join(models.by_name)}), so the trainable must "
            "say which is called with what: define train_batch, without context.loss"
        )

    return refused


def _owned_by(spec: JobSpec) -> Callable[[str, nn.Parameter], bool] | None:
    """Which parameters must be whole for the optimizer."""
    if spec.optimizer.factory != "muon":
        return None
    exclude = spec.optimizer.args.get("exclude", NOT_HIDDEN)
    patterns = [str(each) for each in exclude] if isinstance(exclude, list | tuple) else NOT_HIDDEN
    return lambda name, parameter: is_hidden(name, parameter, patterns)


def _optimizers(
    spec: JobSpec, trainable: Trainable, models: Models, grant: registry.Grant
) -> Optimizers:
    own = trainable.build_optimizer(models.by_name)
    if own is not None:
        if spec.optimizer.groups:
            maker = type(trainable).__name__
            raise GroupError(f"optimizer.groups: {maker}.build_optimizer makes groups of its own")
        return Optimizers.of(own, f"{type(trainable).__name__}.build_optimizer")
    named = list(models.whole.named_parameters())
    groups = spec.optimizer.groups
    over = by_patterns(named, groups) if groups else named
    made = registry.create("optimizer", spec.optimizer, over, grant=grant)
    optimizers = Optimizers.of(made, "optimizer.factory")
    check_options(groups, optimizers.by_name.values())
    return optimizers


def _computes_in_fp16(plan: ShardingPlan) -> bool:
    """Whether any gradient is computed or reduced in it."""
    of_units = {dtype for unit in plan.units for dtype in (unit.param_dtype, unit.reduce_dtype)}
    return "fp16" in {plan.param_dtype, plan.reduce_dtype, *of_units}


def _observe(models: Models, watch: BoardWatch) -> None:
    first = 0
    for name, model in models.by_name.items():
        observe(model, watch if first == 0 else _Further(watch, first))
        first += len(models.units(name))


class _Further:
    """Tells of the units of one more model, whose numbers follow those of the models before it."""

    def __init__(self, watch: BoardWatch, first: int) -> None:
        self._watch = watch
        self._first = first
        self.on_issue = watch.on_issue
        self.on_complete = watch.on_complete

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """A unit entered ``state``."""
        self._watch.on_state(state, self._first + unit_index, unit_fqn)
