"""Factories by name: a built-in's short name, or ``package.module:callable`` (or with a dot for the colon)."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from services.contract.jobs.entry_points import is_entry_point
from services.contract.jobs.secret_references import resolved
from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probe_programs import ProbeSeat
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.data.hf_datasets import hf_dataset
from services.worker.rank.data.roots import DataRoots
from services.worker.rank.data.stdlib_bytes import stdlib_bytes
from services.worker.rank.data.tokens import tokens
from services.worker.rank.models.decoder import Decoder
from services.worker.rank.models.hugging_face import (
    hf_causal_lm,
    hf_sequence_classification,
)
from services.worker.rank.models.loss import (
    UserLoss,
    UserMetrics,
    accuracy,
    bce_with_logits,
    cross_entropy,
    mse,
    next_token,
    next_token_accuracy,
)
from services.worker.rank.optim.optimizers import adamw, muon, sgd
from services.worker.rank.optim.schedules import constant, linear, one_cycle, warmup_cosine, wsd
from services.worker.rank.process.user_path import hidden_by_us, why_not_imported

BUILT_INS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = MappingProxyType(
    {
        "trainable": {},
        "model": {
            "decoder": Decoder,
            "hf_causal_lm": hf_causal_lm,
            "hf_sequence_classification": hf_sequence_classification,
        },
        "data": {"hf_dataset": hf_dataset, "stdlib_bytes": stdlib_bytes, "tokens": tokens},
        "loss": {
            "bce_with_logits": bce_with_logits,
            "cross_entropy": cross_entropy,
            "mse": mse,
            "next_token": next_token,
        },
        "optimizer": {"adamw": adamw, "muon": muon, "sgd": sgd},
        "schedule": {
            "constant": constant,
            "linear": linear,
            "one_cycle": one_cycle,
            "warmup_cosine": warmup_cosine,
            "wsd": wsd,
        },
        "evaluation.metrics": {
            "accuracy": accuracy,
            "next_token_accuracy": next_token_accuracy,
        },
    }
)


_ROOTS: Final = "data_roots"


@dataclass(frozen=True)
class Grant:
    """What the node lets a job have: secrets by name, and the folders that it may read.

    A factory with a parameter ``data_roots`` is given these folders; the spec cannot set it.
    """

    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    data_roots: Sequence[Path] = ()

    @classmethod
    def of(cls, seat: RankSeat | ProbeSeat) -> Self:
        """What a seat grants: a job may read its own uploaded code too, which comes first."""
        code = () if seat.code_folder is None else (seat.code_folder,)
        folders = tuple(map(Path, (*code, *seat.data_roots)))
        return cls(seat.secrets, DataRoots(folders, tuple(map(Path, seat.private_folders))))


NOTHING_GRANTED: Final = Grant()


class FactoryError(ValueError):
    """A factory of the spec cannot be found or does not take its arguments."""


def create(
    field: str,
    factory: Factory,
    *positional: object,
    offered: Mapping[str, object] = MappingProxyType({}),
    grant: Grant = NOTHING_GRANTED,
) -> Any:  # noqa: ANN401 (what a factory makes is for the caller to know)
    """Calls the factory that a field of the spec names: see ``bound``.

    Raises:
        FactoryError: There is no such factory, or it does not take these arguments.
        Exception: Whatever it raises.
    """
    return bound(field, factory, *positional, offered=offered, grant=grant)()


def bound(
    field: str,
    factory: Factory,
    *positional: object,
    offered: Mapping[str, object] = MappingProxyType({}),
    grant: Grant = NOTHING_GRANTED,
) -> Callable[[], Any]:
    """The factory that a field of the spec names, with its arguments, which it takes.

    Args:
        field: ``trainable``, ``model``, ``data``, ``optimizer`` or ``schedule``.
        factory: The name, and the keyword arguments from the spec.
        positional: Arguments that the trainer puts first.
        offered: Arguments that are passed if the callable has parameters of these names and the
            spec does not set them.
        grant: What the node lets the job have.

    Raises:
        FactoryError: There is no such factory, or it does not take these arguments.
    """
    make = find(field, factory.factory)
    return partial(
        make, *positional, **_arguments(field, factory, make, positional, offered, grant)
    )


def function(
    field: str, factory: Factory, called_with: int, grant: Grant = NOTHING_GRANTED
) -> Callable[..., Any]:
    """What a field of the spec names, to be called as it is, with its keyword arguments.

    Args:
        field: ``loss`` or ``evaluation.metrics``.
        factory: The name, and the keyword arguments from the spec.
        called_with: How many arguments the trainer puts first at each call.
        grant: What the node lets the job have.

    Raises:
        FactoryError: There is no such function, or it does not take these arguments.
    """
    make = find(field, factory.factory)
    arguments = _arguments(field, factory, make, (None,) * called_with, {}, grant)
    return partial(make, **arguments) if arguments else make


def chosen_loss(spec: JobSpec, grant: Grant = NOTHING_GRANTED) -> UserLoss | None:
    """The loss that a spec names, to be called with the model's output and the batch; None: none.

    Raises:
        FactoryError: There is no such function, or it does not take its arguments.
    """
    if spec.loss is None:
        return None
    loss: UserLoss = function("loss", spec.loss, 2, grant)
    return loss


def chosen_metrics(spec: JobSpec, grant: Grant = NOTHING_GRANTED) -> UserMetrics | None:
    """What a spec measures in evaluations, to be called as its loss is; None: nothing.

    Raises:
        FactoryError: There is no such function, or it does not take its arguments.
    """
    if spec.evaluation is None:
        return None
    metrics: UserMetrics = function("evaluation.metrics", spec.evaluation.metrics, 2, grant)
    return metrics


def _arguments(
    field: str,
    factory: Factory,
    make: Callable[..., Any],
    positional: tuple[object, ...],
    offered: Mapping[str, object],
    grant: Grant,
) -> dict[str, object]:
    try:
        given: dict[str, object] = resolved(factory.args, grant.secrets)
    except KeyError as error:
        raise FactoryError(f"{field}.args: the secret {error.args[0]} was not granted") from None
    if _ROOTS in given:
        raise FactoryError(f"{field}.args.{_ROOTS}: the node sets this; leave it out")
    try:
        signature = inspect.signature(make)
    except ValueError:  # written in C: it checks its arguments itself
        return given
    takes = signature.parameters
    arguments: dict[str, object] = {
        name: value for name, value in offered.items() if name in takes
    } | given
    if _ROOTS in takes:
        arguments[_ROOTS] = grant.data_roots
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        own = list(takes)[len(positional) :]
        raise FactoryError(
            f"{field}.args: {factory.factory}: {error}; it takes {', '.join(own) or 'nothing'}"
        ) from error
    return arguments


def find(field: str, name: str) -> Callable[..., Any]:
    """The factory that ``name`` means in a field of the spec.

    Raises:
        FactoryError: There is none.
    """
    choices = BUILT_INS[field]
    if name in choices:
        return choices[name]
    if not is_entry_point(name):
        choose = f"choose one of {', '.join(sorted(choices))}, or " if choices else ""
        raise FactoryError(
            f"{field}.factory: there is no built-in {name!r}; {choose}write package.module:callable"
        )
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, SyntaxError) as error:
        hint = why_not_imported(error)
        raise FactoryError(f"{field}.factory: {name}: {error}{hint}") from error
    except AttributeError as error:
        raise FactoryError(
            f"{field}.factory: module {module_name} has no {attribute!r}{_hint(module_name)}"
        ) from error
    if not callable(found):
        raise FactoryError(f"{field}.factory: {name} is not callable")
    checked: Callable[..., Any] = found
    return checked


def _hint(module_name: str) -> str:
    """What a user should know whose module has the name of one of our packages."""
    package = module_name.partition(".")[0]
    return "".join(f": {notice}" for notice in hidden_by_us(sys.path, (package,)))
