"""The names and arguments that the controller accepts are those that the ranks know."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from services.contract.jobs.built_ins import BUILT_IN_ARGUMENTS, BUILT_IN_NAMES, misuse
from services.worker.rank import registry

GIVEN_BY_US = {"parameters", "output", "batch", "data_roots"}
BUILT_INS = [(field, name) for field, named in registry.BUILT_INS.items() for name in sorted(named)]


def test_the_ranks_know_exactly_the_names_that_are_promised() -> None:
    assert {field: frozenset(made) for field, made in registry.BUILT_INS.items()} == dict(
        BUILT_IN_NAMES
    )


@pytest.mark.parametrize(("field", "name"), BUILT_INS)
def test_a_built_in_takes_exactly_the_arguments_that_are_promised(field: str, name: str) -> None:
    made = registry.BUILT_INS[field][name]
    assert dict(BUILT_IN_ARGUMENTS[field][name]) == dict(_arguments(made))


def _arguments(made: Callable[..., Any]) -> dict[str, str]:
    parameters = inspect.signature(made).parameters.values()
    return {
        each.name: _kind(each.annotation, is_required=_is_required(each))
        for each in parameters
        if each.name not in GIVEN_BY_US
    }


def _is_required(parameter: inspect.Parameter) -> bool:
    # The loop offers the number of steps; a spec may give another.
    return parameter.default is inspect.Parameter.empty and parameter.name != "steps"


def _kind(annotation: Any, *, is_required: bool) -> str:  # noqa: ANN401 an annotation
    parts = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    words = " or ".join(_word(part) for part in parts if part is not type(None))
    return words + "!" * is_required + "?" * (type(None) in parts)


def _word(annotation: Any) -> str:  # noqa: ANN401 an annotation
    words = {int: "whole", float: "number", str: "text", bool: "flag"}
    origin = typing.get_origin(annotation)
    if origin is Sequence:
        return words[typing.get_args(annotation)[0]] + "s"
    return "mapping" if origin is Mapping else words[annotation]


@pytest.mark.parametrize(
    ("field", "factory", "args", "place", "words"),
    [
        ("model", "decodr", {}, ("factory",), "no built-in 'decodr'; did you mean 'decoder'?"),
        ("model", "decoder", {"dims": 8}, ("args", "dims"), "did you mean 'dim'?"),
        ("model", "decoder", {"dim": 8.5}, ("args", "dim"), "must be a whole number, not 8.5"),
        ("model", "decoder", {"dim": True}, ("args", "dim"), "must be a whole number, not true"),
        ("optimizer", "adamw", {"lr": "fast"}, ("args", "lr"), "must be a number, not 'fast'"),
        ("optimizer", "adamw", {"betas": [1, "b"]}, ("args", "betas"), "a list of numbers"),
        ("data", "tokens", {}, ("args", "path"), "tokens needs this argument: a text"),
        ("loss", "mse", {"x": 1}, ("args", "x"), "mse has no argument 'x'; it takes none"),
        ("data", "tokens", {"path": {"secret": "HUB"}}, ("args", "path"), "takes no secret"),
        ("optimizer", "adamw", {"lr": {"secret": "HUB"}}, ("args", "lr"), "takes no secret"),
        (
            "model",
            "hf_causal_lm",
            {"overrides": {"told": ["x", {"secret": "HUB"}]}},
            ("args", "overrides"),
            "takes no secret",
        ),
        (
            "model",
            "hf_causal_lm",
            {"attn_implementation": {"": "a/b", "x": {"secret": "HUB"}}},
            ("args", "attn_implementation"),
            "takes no secret",
        ),
    ],
)
def test_what_a_built_in_does_not_take_is_said(
    field: str, factory: str, args: dict[str, Any], place: tuple[str, ...], words: str
) -> None:
    ((found, said),) = misuse(field, factory, args)
    assert found == place
    assert words in said


@pytest.mark.parametrize(
    ("field", "factory", "args"),
    [
        ("model", "decoder", {"hidden": None, "rope_base": 10_000, "dim": 8}),
        ("optimizer", "adamw", {"lr": 1, "betas": [0.9, 1]}),
        ("data", "hf_dataset", {"files": ["a", "b"], "packing": False}),
        ("model", "mine:Net", {"whatever": 1}),
    ],
)
def test_what_it_takes_is_not_refused(field: str, factory: str, args: dict[str, Any]) -> None:
    assert not list(misuse(field, factory, args))
