"""A program of the agent's: profiles the model of a spec, without its memory.

What the user wrote runs here, in a process that may hang, crash or take too much: its agent sees to
the time, this module to the memory. No process group is made. Parameters get values only in a child
that times passes of a model small enough.

What goes wrong need not go wrong in a rank, where tensors have values. Only this is held against the
spec: a factory that is not there or does not take its arguments; one that raises the same when it
makes data or model for real, with as many ranks (that do nothing) as the job has; and first samples
by which the loss is no number, or there is none.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_core.errors import PlanError
from fsdp_core.plan import fakes
from fsdp_core.plan.model import ModelProfile, OptimizerFacts
from fsdp_core.plan.optimizer_facts import optimizer_facts
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from meshloom.data import Batch
from meshloom.trainable import Trainable
from services.contract.jobs.plans import default_micro_batch
from services.contract.jobs.spec_parts import Factory
from services.contract.messages.probe_programs import ProbeSeat
from services.contract.messages.probing import ModelProbed, ProbeFailure
from services.contract.system.mask import Mask
from services.contract.words.bounds import TRACEBACK_CHARACTERS, mask_before_cuts, shortened
from services.worker.rank import registry
from services.worker.rank.data import batches
from services.worker.rank.data.checks import VocabularyError, check_tokenizer
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.share import Share
from services.worker.rank.loop.parts import built_by_meta, made_data, trainable_of
from services.worker.rank.models.loss import checked
from services.worker.rank.models.several import ALONE, checked_module
from services.worker.rank.optim.several import Optimizers
from services.worker.rank.probe.first_samples import FirstSamples, SampleError, check
from services.worker.rank.probe.passes import ProbeContext, pass_for_real
from services.worker.rank.process.failures import chain_of, one_line, traceback_of
from services.worker.rank.process.host_memory import lacks_host_memory, limit_memory, limited_memory
from services.worker.rank.process.probe_program import Question
from services.worker.rank.process.user_path import add_code

_MIB: Final = 1 << 20
_REAL_BYTES: Final = 1 << 30
"""Private memory that data or a model may take that is made for real; ranks may run beside it."""


@dataclass
class _Course:
    """What is looked at: which ``part`` of the spec, and how to make it for real while it is made.

    ``model``: as it was built last, without values. ``tokenizer_size``: that of the data, if it says it.
    """

    part: str = "spec"
    for_real: Callable[[], object] | None = None
    is_a_pass: bool = False
    model: nn.Module | None = None
    tokenizer_size: int | None = None

    @contextlib.contextmanager
    def making(self, for_real: Callable[[], object], *, is_a_pass: bool = False) -> Iterator[None]:
        """Within, a factory of the spec is at work, or a pass of the model is followed."""
        self.for_real, self.is_a_pass = for_real, is_a_pass
        yield
        self.for_real = None


def main(asked: Question) -> NoReturn:
    """Answer the agent's question."""
    seat = ProbeSeat.model_validate_json(asked.question)
    mask_before_cuts(Mask(seat.secrets).text)
    torch.set_num_threads(1)
    limit_memory(seat.memory_bytes)
    if seat.code_folder is not None:
        add_code(seat.code_folder)
    asked.reply(probe(seat))


def probe(seat: ProbeSeat) -> ModelProbed:
    """The profile, or why there is none; never raises."""
    question, began = seat.question, time.monotonic()
    about = {"probe_id": question.probe_id, "node_id": seat.node_id}
    course = _Course()
    try:
        _bind(seat, course)
        sample, first = _samples(seat, course)
        course.part = "model"
        course.tokenizer_size = first.tokenizer_size
        profile = _profile(seat, sample, course)
        _check(first, seat, course)
        course.part = "optimizer"
        optimizer = _optimizer(seat)
    except BaseException as error:  # noqa: BLE001 whatever the user's code raises is an answer
        found: dict[str, Any] = {"failure": _failure(error, course, seat)}
    else:
        tokens = batches.predicted_tokens(sample)
        found = {
            "profile": profile,
            "optimizer": optimizer,
            "sequence_tokens": tokens or 1,
            "throughput_unit": "samples" if tokens is None else "tokens",
        }
    return ModelProbed.model_validate({**about, **found, "took_s": time.monotonic() - began})


def _profile(seat: ProbeSeat, sample: Batch, course: _Course) -> ModelProfile:
    question, study = seat.question, _study(seat, sample, course)
    return profile_model(
        study, question.conditions, stops=question.stops, timed_within=seat.memory_bytes
    )


# -- What the spec names


def _grant(seat: ProbeSeat) -> registry.Grant:
    return registry.Grant.of(seat)


def _bind(seat: ProbeSeat, course: _Course) -> None:
    """Looks at all factories and their arguments, as a rank would, before any is called.

    Raises:
        FactoryError: One is not there, or does not take its arguments.
    """
    spec = seat.question.spec
    parts: tuple[tuple[str, Factory | None, tuple[object, ...], dict[str, object]], ...] = (
        ("data", spec.data, (), {"seed": spec.train.seed}),
        ("trainable", spec.trainable, (), {}),
        ("model", spec.model, (), {}),
        ("optimizer", spec.optimizer, ([],), {}),
        ("schedule", spec.schedule, (), {"steps": spec.train.steps}),
    )
    for part, factory, positional, offered in parts:
        if factory is None:
            continue
        course.part = part
        with course.making(partial(registry.find, part, factory.factory)):
            registry.bound(part, factory, *positional, offered=offered, grant=_grant(seat))
    course.part = "loss"
    registry.chosen_loss(spec, _grant(seat))
    registry.chosen_metrics(spec, _grant(seat))


def _samples(seat: ProbeSeat, course: _Course) -> tuple[Batch, FirstSamples]:
    """One sample of the data, as a batch, and the first ones."""
    spec = seat.question.spec

    def make() -> Any:  # noqa: ANN401 (whatever the factory makes)
        return made_data(spec, trainable_of(spec, _grant(seat)), _grant(seat))

    course.part = "data"

    of_a_rank = spec.train.global_batch // spec.worlds[-1]
    is_cast = any(each.param_dtype in {"bf16", "fp16"} for each in seat.question.conditions)

    def taken() -> tuple[Batch, FirstSamples]:
        share = Share(spec.train.global_batch, 0, 1)
        with contextlib.closing(feed_of(make(), share, spec.train.seed)) as feed:
            sample = feed.sample()
            batches.rows(sample)
            return sample, FirstSamples.of(feed, of_a_rank, is_cast=is_cast)

    with course.making(taken):
        return taken()


def _optimizer(seat: ProbeSeat) -> OptimizerFacts:
    question, spec = seat.question, seat.question.spec
    trainable = trainable_of(spec, _grant(seat))

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        model = nn.ParameterList(parameters)
        made = trainable.build_optimizer({ALONE: model})
        if made is None:
            named = [(f"parameter{name}", each) for name, each in model.named_parameters()]
            made = registry.create("optimizer", spec.optimizer, named, grant=_grant(seat))
        several = Optimizers.of(made, "optimizer.factory")
        return cast("torch.optim.Optimizer", _StepsAll(several.named(None)))

    facts = optimizer_facts(make, question.device_type)
    return facts if spec.train.ema is None else _with_averages(facts)


def _with_averages(facts: OptimizerFacts) -> OptimizerFacts:
    """The same with a copy more of each parameter."""
    matrices = facts.matrices
    if matrices is not None:
        matrices = replace(matrices, copies=matrices.copies + 1)
    return replace(facts, state_copies=facts.state_copies + 1, matrices=matrices)


@dataclass(frozen=True)
class _StepsAll:
    """Several optimizers, as far as their steps are looked at."""

    optimizers: Sequence[torch.optim.Optimizer]

    def step(self) -> None:
        """One of each."""
        for optimizer in self.optimizers:
            optimizer.step()


def _study(seat: ProbeSeat, sample: Batch, course: _Course) -> ModelUnderStudy:
    question = seat.question
    spec = question.spec
    by_meta = built_by_meta(spec, trainable_of(spec, _grant(seat)))
    # A pass belongs to the trainable that built its model.
    builders: WeakKeyDictionary[nn.Module, Trainable] = WeakKeyDictionary()

    def built(trainable: Trainable) -> nn.Module | None:
        built = trainable.build_model()
        return None if isinstance(built, Mapping) else checked_module(built)

    def for_real() -> nn.Module | None:
        with torch.device("meta" if by_meta else "cpu"):
            return built(trainable_of(spec, _grant(seat)))

    def make() -> nn.Module:
        with course.making(for_real):
            trainable = trainable_of(spec, _grant(seat))
            model = course.model = built(trainable)
        if model is None:
            raise NotFollowedError("the probe does not follow several models in one trainable")
        check_tokenizer(course.tokenizer_size, model)
        if trainable.steps_itself:
            raise NotFollowedError("the probe does not follow a trainable that steps itself")
        builders[model] = trainable
        return model

    chosen = registry.chosen_loss(spec, _grant(seat))

    def loss(model: nn.Module, samples: int) -> torch.Tensor:
        again = partial(_passes_for_real, sample, seat)
        with course.making(again, is_a_pass=True):
            context = ProbeContext(model, chosen)
            given = batches.zeros_like(sample, samples)
            return checked(builders[model].train_batch(given, context)).loss

    return ModelUnderStudy(
        make,
        loss,
        question.device_type,
        question.tensor_parallel,
        built_whole=not by_meta,
    )


def _check(first: FirstSamples, seat: ProbeSeat, course: _Course) -> None:
    """Raises if a rank could not train on the first samples."""
    if course.model is None:
        return

    def train(batch: Batch) -> torch.Tensor:
        with limited_memory(_REAL_BYTES), fakes.fake_ranks(seat.question.spec.fewest_ranks):
            return pass_for_real(batch, seat)

    check(first, course.model, train)


def _passes_for_real(sample: Batch, seat: ProbeSeat) -> None:
    """A pass over as many samples as a rank has in one."""
    spec = seat.question.spec
    per_rank = max(1, spec.train.global_batch // spec.fewest_ranks)
    asked = spec.train.micro_batch
    length = batches.predicted_tokens(sample) or 1
    size = default_micro_batch(per_rank, length) if asked == "auto" else asked
    pass_for_real(batches.joined([sample] * size), seat)


class NotFollowedError(Exception):
    """A trainable does what the probe cannot look at; its job runs with the default layout."""


# -- What went wrong


def _failure(error: BaseException, course: _Course, seat: ProbeSeat) -> ProbeFailure:
    mask = Mask(seat.secrets)
    said = f"{course.part}: {one_line(error, mask)}"
    traceback = shortened(mask.text(traceback_of(error)), TRACEBACK_CHARACTERS)
    if any(map(_is_out_of_memory, chain_of(error))):
        advice = (
            f"{said} (the probe may take {seat.memory_bytes // _MIB} MiB; parameters are made on "
            "the meta device and take none, unless the model makes them on a device that it names "
            "itself)"
        )
        return ProbeFailure(code="out_of_memory", reason=advice, traceback=traceback)
    if isinstance(error, PlanError):
        return ProbeFailure(code="refused", reason=str(error))
    if isinstance(error, registry.FactoryError | SampleError | VocabularyError):
        return ProbeFailure(code="wrong_spec", reason=str(error))
    again = None
    if course.for_real is not None:
        again = _raised_for_real(course.for_real, error, seat.question.spec.fewest_ranks)
    # What a pass says of shapes without values is in other words than what a rank will say.
    if again is None or not (course.is_a_pass or _is_alike(again, error)):
        return ProbeFailure(code="raised", reason=said, traceback=traceback)
    certain = f"{course.part}: {one_line(again, mask)}"
    return ProbeFailure(code="wrong_spec", reason=certain, traceback=traceback)


def _raised_for_real(
    make: Callable[[], object], error: BaseException, ranks: int
) -> BaseException | None:
    """What ``make`` raises where there are values, and ranks beside it, as in a job.

    What the operating system refuses says nothing of another node.
    """
    if not isinstance(error, Exception) or isinstance(error, OSError):
        return None
    try:
        with limited_memory(_REAL_BYTES), fakes.fake_ranks(ranks):
            make()
    except Exception as again:  # noqa: BLE001 what it is says whether it counts
        is_the_nodes = isinstance(again, OSError) or any(map(_is_out_of_memory, chain_of(again)))
        return None if is_the_nodes else again
    return None


def _is_alike(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and str(one) == str(other)


def _is_out_of_memory(error: BaseException) -> bool:
    return lacks_host_memory(error) or isinstance(error, torch.OutOfMemoryError)
