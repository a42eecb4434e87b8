"""The short names that a spec may say instead of ``package.module:callable``, by field, and their arguments.

The ranks' registry must have exactly these; the controller refuses all others when it is asked.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from services.contract.jobs.secret_references import looks_secret, references
from services.contract.words.error_values import did_you_mean, shown

_SGD: Final = {"lr": "number", "momentum": "number", "weight_decay": "number", "nesterov": "flag"}
_OF_TEXT: Final = {"seq_len": "whole", "validation_batch": "whole", "workers": "whole"}
_HF: Final = {
    "config": "text?",
    "model": "text?",
    "overrides": "mapping?",
    "attn_implementation": "text",
}

BUILT_IN_ARGUMENTS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = MappingProxyType(
    {
        "trainable": {},
        "model": {
            "decoder": {
                "dim": "whole",
                "layers": "whole",
                "heads": "whole",
                "vocab": "whole",
                "hidden": "whole?",
                "rope_base": "number",
            },
            "hf_causal_lm": _HF,
            "hf_sequence_classification": {**_HF, "num_labels": "whole?"},
        },
        "data": {
            "hf_dataset": {
                **_OF_TEXT,
                "files": "text or texts!",
                "tokenizer": "text?",
                "text": "text",
                "prompt": "text?",
                "columns": "texts?",
                "validation": "text or texts?",
                "validation_fraction": "number",
                "packing": "flag",
            },
            "stdlib_bytes": {
                "seq_len": "whole",
                "validation_sequences": "whole",
                "validation_batch": "whole",
                "library": "text?",
                "seed": "whole",
            },
            "tokens": {
                **_OF_TEXT,
                "path": "text!",
                "validation": "text?",
                "validation_fraction": "number",
                "verify": "flag?",
            },
        },
        "loss": {"bce_with_logits": {}, "cross_entropy": {}, "mse": {}, "next_token": {}},
        "optimizer": {
            "adamw": {
                "lr": "number",
                "weight_decay": "number",
                "betas": "numbers",
                "eps": "number",
            },
            "muon": {
                "lr": "number",
                "weight_decay": "number",
                "momentum": "number",
                "betas": "numbers",
                "exclude": "texts",
            },
            "sgd": _SGD,
        },
        "schedule": {
            "constant": {},
            "linear": {"warmup_steps": "whole", "floor": "number", "steps": "whole"},
            "one_cycle": {
                "rise": "number",
                "start": "number",
                "floor": "number",
                "steps": "whole",
            },
            "warmup_cosine": {"warmup_steps": "whole", "floor": "number", "steps": "whole"},
            "wsd": {
                "warmup_steps": "whole",
                "decay_steps": "whole?",
                "floor": "number",
                "steps": "whole",
            },
        },
        "evaluation.metrics": {"accuracy": {}, "next_token_accuracy": {}},
    }
)
"""By field and name: of each argument its kind; ``?``: or null, ``!``: it must be given."""

BUILT_IN_NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {field: frozenset(named) for field, named in BUILT_IN_ARGUMENTS.items()}
)
"""The names alone."""

_WORDS: Final = {
    "whole": "a whole number",
    "number": "a number",
    "text": "a text",
    "texts": "a list of texts",
    "numbers": "a list of numbers",
    "text or texts": "a text or a list of texts",
    "flag": "true or false",
    "mapping": "a mapping of names to values",
}


def misuse(
    field: str, factory: str, args: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with a factory of a spec: where below the field, and what.

    Args:
        field: Such as ``model`` or ``evaluation.metrics``.
        factory: A built-in's short name; an entry point takes what its own code says.
        args: Its arguments.
    """
    if ":" in factory or "." in factory:
        return
    choices = BUILT_IN_NAMES[field]
    if factory not in choices:
        choose = f"choose one of {', '.join(sorted(choices))}, or " if choices else ""
        guess = did_you_mean(factory, choices)
        why = (
            f"there is no built-in {factory!r}{guess or ';'} {choose}write package.module:callable"
        )
        yield ("factory",), f"{field}.factory: {why}"
        return
    known = BUILT_IN_ARGUMENTS[field][factory]
    for name, value in args.items():
        kind = known.get(name)
        if kind is None:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            yield (
                ("args", name),
                f"{factory} has no argument {name!r}{did_you_mean(name, known) or ';'} {takes}",
            )
        elif next(references(value), None) is not None:
            # A model's configuration is exported, and errors tell paths in forms that no mask knows.
            yield ("args", name), f"{factory} takes no secret; only code that needs one may name it"
        elif not _is_of(kind, value):
            words = _WORDS[kind.rstrip("?!")]
            there = "" if looks_secret(name, value) else f", not {shown(value)}"
            yield ("args", name), f"must be {words}{there}"
    for name, kind in known.items():
        if kind.endswith("!") and name not in args:
            yield ("args", name), f"{factory} needs this argument: {_WORDS[kind.rstrip('!')]}"


def _is_of(kind: str, value: object) -> bool:
    if value is None:
        return kind.endswith("?")
    return any(_is_one(each, value) for each in kind.rstrip("?!").split(" or "))


def _is_one(kind: str, value: object) -> bool:
    if kind.endswith("s"):
        return isinstance(value, list) and all(_is_one(kind[:-1], each) for each in value)
    if isinstance(value, bool):
        return kind == "flag"
    kinds: dict[str, type | tuple[type, ...]] = {
        "whole": int,
        "number": (int, float),
        "text": str,
        "mapping": dict,
    }
    return isinstance(value, kinds.get(kind, ()))
