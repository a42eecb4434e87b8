"""Factories by name: a built-in's short name, or ``package.module:callable``."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from services.contract.specs import Factory
from services.worker.rank.data.stdlib_bytes import stdlib_bytes
from services.worker.rank.models.decoder import Decoder
from services.worker.rank.optimizers import adamw, sgd
from services.worker.rank.schedules import constant, warmup_cosine

BUILT_INS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = MappingProxyType(
    {
        "model": {"decoder": Decoder},
        "data": {"stdlib_bytes": stdlib_bytes},
        "optimizer": {"adamw": adamw, "sgd": sgd},
        "schedule": {"constant": constant, "warmup_cosine": warmup_cosine},
    }
)


class FactoryError(ValueError):
    """A factory of the spec cannot be found or does not take its arguments."""


def create(
    field: str,
    factory: Factory,
    *positional: object,
    offered: Mapping[str, object] = MappingProxyType({}),
) -> Any:  # noqa: ANN401 (what a factory makes is for the caller to know)
    """Calls the factory that a field of the spec names.

    Args:
        field: ``model``, ``data``, ``optimizer`` or ``schedule``.
        factory: The name, and the keyword arguments from the spec.
        positional: Arguments that the trainer puts first.
        offered: Arguments that are passed if the callable has parameters of these names and the
            spec does not set them.

    Raises:
        FactoryError: There is no such factory, or it does not take these arguments.
    """
    make = find(field, factory.factory)
    try:
        signature = inspect.signature(make)
    except ValueError:  # written in C: it checks its arguments itself
        return make(*positional, **factory.args)
    takes = signature.parameters
    arguments = {name: value for name, value in offered.items() if name in takes} | factory.args
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        own = list(takes)[len(positional) :]
        raise FactoryError(
            f"{field}.args: {factory.factory}: {error}; it takes {', '.join(own) or 'nothing'}"
        ) from error
    return make(*positional, **arguments)


def find(field: str, name: str) -> Callable[..., Any]:
    """The factory that ``name`` means in a field of the spec.

    Raises:
        FactoryError: There is none.
    """
    choices = BUILT_INS[field]
    if name in choices:
        return choices[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise FactoryError(
            f"{field}.factory: there is no built-in {name!r}; choose one of "
            f"{', '.join(sorted(choices))}, or write package.module:callable"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise FactoryError(f"{field}.factory: {name}: {error}") from error
    except AttributeError as error:
        raise FactoryError(f"{field}.factory: module {module_name} has no {attribute!r}") from error
    if not callable(found):
        raise FactoryError(f"{field}.factory: {name} is not callable")
    checked: Callable[..., Any] = found
    return checked
