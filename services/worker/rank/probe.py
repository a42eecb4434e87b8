"""``python -m services.worker.rank.probe``: profiles the model of a spec, without its memory.

What the user wrote runs here, in a process that may hang, crash or take too much: its agent sees to
the time, this module to the memory. No process group is made, no parameter gets a value.
"""

import gc
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage; looking for it takes a fifth of their time

import torch
from torch import nn

from fsdp_core.errors import PlanError
from fsdp_core.plan.model import OptimizerFacts
from fsdp_core.plan.optimizer_facts import optimizer_facts
from fsdp_core.plan.profiling import ModelUnderStudy, profile_model
from services.contract.messages.asking import ProbeSeat
from services.contract.messages.probing import ModelProbed, ProbeFailure
from services.worker.rank import registry
from services.worker.rank.asked import take_question
from services.worker.rank.data.source import DataSource
from services.worker.rank.failures import lacks_host_memory, one_line, shortened, traceback_of
from services.worker.rank.loss import loss_of
from services.worker.rank.materialise import checked_module
from services.worker.rank.models.protocol import LossModel
from services.worker.rank.warm import limit_memory

_BATCH_DIMS: Final = 2
_MIB: Final = 1 << 20


def main() -> NoReturn:
    """Answer the agent's question."""
    gc.freeze()
    gc.enable()
    asked = take_question("services.worker.rank.probe")
    seat = ProbeSeat.model_validate_json(asked.question)
    torch.set_num_threads(1)
    limit_memory(seat.memory_bytes)
    asked.reply(probe(seat))


def probe(seat: ProbeSeat) -> ModelProbed:
    """The profile, or why there is none; never raises."""
    question, began = seat.question, time.monotonic()
    about = {"probe_id": question.probe_id, "node_id": seat.node_id}
    asked_for = "data"
    try:
        length = _sequence_tokens(seat)
        asked_for = "model"
        profile = profile_model(_study(seat, length), question.conditions, stops=question.stops)
        asked_for = "optimizer"
        optimizer = _optimizer(seat)
    except BaseException as error:  # noqa: BLE001 whatever the user's code raises is an answer
        failure = _failure(error, asked_for, seat.memory_bytes)
        found: dict[str, Any] = {"failure": failure}
    else:
        found = {"profile": profile, "optimizer": optimizer, "sequence_tokens": length}
    return ModelProbed.model_validate({**about, **found, "took_s": time.monotonic() - began})


# -- What the spec names


def _grant(seat: ProbeSeat) -> registry.Grant:
    return registry.Grant(seat.secrets, tuple(map(Path, seat.data_roots)))


def _sequence_tokens(seat: ProbeSeat) -> int:
    spec = seat.question.spec
    data: DataSource = registry.create(
        "data", spec.data, offered={"seed": spec.train.seed}, grant=_grant(seat)
    )
    shape = tuple(data.batch(1, [0]).shape)
    if len(shape) != _BATCH_DIMS or shape[1] <= 1:
        raise ValueError(f"batch(1, [0]) has the shape {shape}, not [1, length + 1]")
    return shape[1] - 1


def _optimizer(seat: ProbeSeat) -> OptimizerFacts:
    question = seat.question

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        named = [(f"parameter{place}", each) for place, each in enumerate(parameters)]
        made: torch.optim.Optimizer = registry.create(
            "optimizer", question.spec.optimizer, named, grant=_grant(seat)
        )
        return made

    return optimizer_facts(make, question.device_type)


def _study(seat: ProbeSeat, length: int) -> ModelUnderStudy:
    question = seat.question

    def make() -> nn.Module:
        return checked_module(registry.create("model", question.spec.model, grant=_grant(seat)))

    def loss(model: nn.Module, sequences: int) -> torch.Tensor:
        return mean_loss(model, torch.zeros(sequences, length + 1, dtype=torch.int64))

    return ModelUnderStudy(make, loss, question.device_type, question.tensor_parallel)


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss as a rank computes it, with the root's hooks around it as the engine has them.

    Args:
        model: Not sharded.
        tokens: int64 ``[batch, length + 1]``.
    """
    if not isinstance(model, LossModel):
        return loss_of(model)(tokens)
    loss, forward = model.loss, vars(model).get("forward")

    def loss_as_forward(tokens: torch.Tensor) -> torch.Tensor:
        # From here on forward is itself again, which the loss may call.
        del model.forward
        if forward is not None:
            model.forward = forward
        return loss(tokens)

    model.forward = loss_as_forward
    computed: torch.Tensor = model(tokens)
    return computed


# -- What went wrong


def _failure(error: BaseException, asked_for: str, allowance: int) -> ProbeFailure:
    said = f"{asked_for}: {one_line(error)}"
    if isinstance(error, registry.FactoryError | PlanError):
        return ProbeFailure(code="refused", reason=str(error))
    traceback = shortened(traceback_of(error))
    if any(map(_is_out_of_memory, _chain(error))):
        advice = (
            f"{said} (the probe may take {allowance // _MIB} MiB; parameters are made on the meta "
            "device and take none, unless the model makes them on a device that it names itself)"
        )
        return ProbeFailure(code="out_of_memory", reason=advice, traceback=traceback)
    return ProbeFailure(code="raised", reason=said, traceback=traceback)


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
