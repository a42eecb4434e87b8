"""``python -m services.worker.rank.probe.profile``: profiles the model of a spec, without its memory.

What the user wrote runs here, in a process that may hang, crash or take too much: its agent sees to
the time, this module to the memory. No process group is made. Parameters get values only in a child
that times passes of a model small enough.

What goes wrong need not go wrong in a rank, where tensors have values. Only this is held against the
spec: a factory that is not there or does not take its arguments, and one that raises the same when it
makes data or model for real, with as many ranks (that do nothing) as the job has.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage; looking for it takes a fifth of their time

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.errors import PlanError
from fsdp_core.plan.model import ModelProfile, OptimizerFacts
from fsdp_core.plan.optimizer_facts import optimizer_facts
from fsdp_core.plan.pass_timing import timed_passes
from fsdp_core.plan.profiling import ModelUnderStudy, profile_model
from meshloom.data import DataSource
from services.contract.messages.asking import ProbeSeat
from services.contract.messages.probing import ModelProbed, ProbeFailure
from services.contract.messages.rank_pipe import TRACEBACK_CHARACTERS, shortened
from services.contract.specs import Factory
from services.worker.rank import registry
from services.worker.rank.models.loss import checked, loss_of
from services.worker.rank.models.materialise import checked_module
from services.worker.rank.models.protocol import LossModel
from services.worker.rank.process.asked import take_question
from services.worker.rank.process.failures import one_line, traceback_of
from services.worker.rank.process.host_memory import lacks_host_memory, limit_memory, limited_memory
from services.worker.rank.process.user_path import add_code

_BATCH_DIMS: Final = 2
_MIB: Final = 1 << 20
_REAL_BYTES: Final = 1 << 30
"""Private memory that data or a model may take that is made for real; ranks may run beside it."""


@dataclass
class _Course:
    """What is looked at: which ``part`` of the spec, and how to make it for real while it is made."""

    part: str = "spec"
    for_real: Callable[[], object] | None = None

    @contextlib.contextmanager
    def making(self, for_real: Callable[[], object]) -> Iterator[None]:
        """Within, a factory of the spec is at work."""
        self.for_real = for_real
        yield
        self.for_real = None


def main() -> NoReturn:
    """Answer the agent's question."""
    gc.freeze()
    gc.enable()
    asked = take_question("services.worker.rank.probe.profile")
    seat = ProbeSeat.model_validate_json(asked.question)
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
        length = _sequence_tokens(seat, course)
        course.part = "model"
        profile = _profile(seat, length, course)
        course.part = "optimizer"
        optimizer = _optimizer(seat)
    except BaseException as error:  # noqa: BLE001 whatever the user's code raises is an answer
        found: dict[str, Any] = {"failure": _failure(error, course, seat)}
    else:
        found = {"profile": profile, "optimizer": optimizer, "sequence_tokens": length}
    return ModelProbed.model_validate({**about, **found, "took_s": time.monotonic() - began})


def _profile(seat: ProbeSeat, length: int, course: _Course) -> ModelProfile:
    question, study = seat.question, _study(seat, length, course)
    profile = profile_model(study, question.conditions, stops=question.stops)
    dtype = question.conditions[0].param_dtype
    return replace(profile, timed=timed_passes(study, profile, seat.memory_bytes, dtype))


# -- What the spec names


def _grant(seat: ProbeSeat) -> registry.Grant:
    return registry.Grant(seat.secrets, tuple(map(Path, seat.data_roots)))


def _bind(seat: ProbeSeat, course: _Course) -> None:
    """Looks at all factories and their arguments, as a rank would, before any is called.

    Raises:
        FactoryError: One is not there, or does not take its arguments.
    """
    spec = seat.question.spec
    parts: tuple[tuple[str, Factory, tuple[object, ...], dict[str, object]], ...] = (
        ("data", spec.data, (), {"seed": spec.train.seed}),
        ("model", spec.model, (), {}),
        ("optimizer", spec.optimizer, ([],), {}),
        ("schedule", spec.schedule, (), {"steps": spec.train.steps}),
    )
    for part, factory, positional, offered in parts:
        course.part = part
        with course.making(partial(registry.find, part, factory.factory)):
            registry.bound(part, factory, *positional, offered=offered, grant=_grant(seat))


def _sequence_tokens(seat: ProbeSeat, course: _Course) -> int:
    spec = seat.question.spec
    make = registry.bound("data", spec.data, offered={"seed": spec.train.seed}, grant=_grant(seat))
    course.part = "data"
    with course.making(make):
        data: DataSource = make()
    shape = tuple(data.batch(1, [0]).shape)
    if len(shape) != _BATCH_DIMS or shape[1] <= 1:
        raise ValueError(f"batch(1, [0]) has the shape {shape}, not [1, length + 1]")
    return int(shape[1]) - 1


def _optimizer(seat: ProbeSeat) -> OptimizerFacts:
    question = seat.question

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        named = [(f"parameter{place}", each) for place, each in enumerate(parameters)]
        made: torch.optim.Optimizer = registry.create(
            "optimizer", question.spec.optimizer, named, grant=_grant(seat)
        )
        return made

    return optimizer_facts(make, question.device_type)


def _study(seat: ProbeSeat, length: int, course: _Course) -> ModelUnderStudy:
    question = seat.question
    bound = registry.bound("model", question.spec.model, grant=_grant(seat))
    by_meta = getattr(registry.find("model", question.spec.model.factory), "meta_init", False)

    def for_real() -> nn.Module:
        with torch.device("meta" if by_meta else "cpu"):
            return checked_module(bound())

    def make() -> nn.Module:
        with course.making(for_real):
            return checked_module(bound())

    def loss(model: nn.Module, sequences: int) -> torch.Tensor:
        return mean_loss(model, torch.zeros(sequences, length + 1, dtype=torch.int64))

    return ModelUnderStudy(
        make,
        loss,
        question.device_type,
        question.tensor_parallel,
        built_whole=not by_meta,
    )


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss as a rank computes it, with the root's hooks around it as the engine has them.

    Args:
        model: Not sharded.
        tokens: int64 ``[batch, length + 1]``.
    """
    if not isinstance(model, LossModel):
        return loss_of(model)(tokens).loss
    loss, forward = model.loss, vars(model).get("forward")

    def loss_as_forward(tokens: torch.Tensor) -> torch.Tensor:
        # From here on forward is itself again, which the loss may call.
        del model.forward
        if forward is not None:
            model.forward = forward
        return checked(loss(tokens)).loss

    model.forward = loss_as_forward
    computed: torch.Tensor = model(tokens)
    return computed


# -- What went wrong


def _failure(error: BaseException, course: _Course, seat: ProbeSeat) -> ProbeFailure:
    said = f"{course.part}: {one_line(error)}"
    traceback = shortened(traceback_of(error), TRACEBACK_CHARACTERS)
    if any(map(_is_out_of_memory, _chain(error))):
        advice = (
            f"{said} (the probe may take {seat.memory_bytes // _MIB} MiB; parameters are made on "
            "the meta device and take none, unless the model makes them on a device that it names "
            "itself)"
        )
        return ProbeFailure(code="out_of_memory", reason=advice, traceback=traceback)
    if isinstance(error, PlanError):
        return ProbeFailure(code="refused", reason=str(error))
    if isinstance(error, registry.FactoryError):
        return ProbeFailure(code="wrong_spec", reason=str(error))
    is_certain = course.for_real is not None and _raises_for_real(
        course.for_real, error, seat.question.spec.worlds[0]
    )
    code: Literal["wrong_spec", "raised"] = "wrong_spec" if is_certain else "raised"
    return ProbeFailure(code=code, reason=said, traceback=traceback)


def _raises_for_real(make: Callable[[], object], error: BaseException, ranks: int) -> bool:
    """Whether ``make`` raises the same where it has values, and ranks beside it, as in a job.

    What the operating system refuses says nothing of another node.
    """
    if not isinstance(error, Exception) or isinstance(error, OSError):
        return False
    try:
        with limited_memory(_REAL_BYTES), torch_private.fake_ranks(ranks):
            make()
    except BaseException as again:  # noqa: BLE001 what it is says whether it counts
        return type(again) is type(error) and str(again) == str(error)
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    return lacks_host_memory(error) or isinstance(error, torch.OutOfMemoryError)


if __name__ == "__main__":
    main()
