"""The public surface takes what the reference's takes, and assumes the same where nothing is said."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator

import pytest
from torch import nn

import fsdp_core
from fsdp_core import fully_shard

# Only the oracle may load it.
REFERENCE = importlib.import_module("torch.distributed.fsdp")
NAMES = importlib.import_module("torch.distributed.fsdp._fully_shard").__all__


def callables() -> Iterator[str]:
    for name in NAMES:
        found = getattr(REFERENCE, name)
        if not isinstance(found, type) or dataclasses.is_dataclass(found):
            yield name
    for owner in ("FSDPModule", "UnshardHandle"):
        for name, found in vars(getattr(REFERENCE, owner)).items():
            if inspect.isfunction(found) and name != "_apply":  # nn.Module's, spelled out by us
                yield f"{owner}.{name}"


def found_in(package: object, path: str) -> Callable[..., object]:
    for name in path.split("."):
        package = getattr(package, name)
    assert callable(package)
    return package


def parameters(function: Callable[..., object]) -> list[tuple[str, str, str]]:
    # Defaults such as MixedPrecisionPolicy() are equal if they say the same.
    return [
        (each.name, each.kind.name, repr(each.default))
        for each in inspect.signature(function).parameters.values()
    ]


def test_every_name_of_the_reference_is_public() -> None:
    assert set(NAMES) <= set(fsdp_core.__all__)
    for name in NAMES:
        ours, theirs = getattr(fsdp_core, name), getattr(REFERENCE, name)
        assert isinstance(ours, type) == isinstance(theirs, type)
        assert ours.__name__ == theirs.__name__


@pytest.mark.parametrize("path", list(callables()))
def test_parameters_and_defaults_are_those_of_the_reference(path: str) -> None:
    theirs, ours = parameters(found_in(REFERENCE, path)), parameters(found_in(fsdp_core, path))
    # Older versions lack some of what ours takes.
    assert [each for each in ours if each in theirs] == theirs
    more = [each for each in ours if each not in theirs]
    assert not [name for name, _, default in more if default == repr(inspect.Parameter.empty)]


@pytest.mark.parametrize("name", [n for n in NAMES if "Polic" in n or "Dims" in n])
def test_policies_compare_and_derive_as_the_references_do(name: str) -> None:
    ours, theirs = getattr(fsdp_core, name), getattr(REFERENCE, name)
    for flag in ("eq", "order", "unsafe_hash"):
        mine, its = ours.__dataclass_params__, theirs.__dataclass_params__
        assert getattr(mine, flag) == getattr(its, flag)
    assert [b.__name__ for b in ours.__mro__] == [b.__name__ for b in theirs.__mro__]


def test_a_handle_for_nothing_has_nothing_to_wait_for() -> None:
    fsdp_core.UnshardHandle().wait()


def test_a_module_that_is_not_sharded_has_no_state() -> None:
    assert fully_shard.state(nn.Linear(1, 1)) is None
