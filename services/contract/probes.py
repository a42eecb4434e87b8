"""The name of a probe: the same for all questions to which the answer is the same."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from fsdp_core.plan.model import PROFILE_VERSION
from services.contract.messages.probing import ProbeModel

_OF_THE_SPEC: Final = ("model", "data", "optimizer")
_OF_THE_SPEC_IF_SET: Final = ("trainable", "loss", "code")
_OF_THE_TRAINING: Final = ("precision",)
_OF_THE_TRAINING_IF_SET: Final = ("ema",)


def probe_id(question: ProbeModel, versions: Mapping[str, str]) -> str:
    """The id that ``question`` should carry; the one that it carries plays no part.

    Args:
        question: What is asked.
        versions: Of what decides how a model is built, by name, on the node that is asked.
    """
    text = json.dumps(
        {
            "profile": PROFILE_VERSION,
            "versions": dict(sorted(versions.items())),
            "spec": _chosen(question.spec, _OF_THE_SPEC, _OF_THE_SPEC_IF_SET),
            "train": _chosen(question.spec.train, _OF_THE_TRAINING, _OF_THE_TRAINING_IF_SET),
            "question": question.model_dump(
                mode="json", exclude={"probe_id", "spec", "timeout_s", "memory_bytes"}
            ),
        },
        sort_keys=True,
    )
    return f"probe_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _chosen(part: BaseModel, always: Iterable[str], if_set: Iterable[str]) -> dict[str, Any]:
    """Fields of a spec; those that came later only if they say something, so that names stay."""
    fields = part.model_dump(mode="json", include={*always, *if_set})
    chosen = {name: fields[name] for name in always}
    if (optimizer := chosen.get("optimizer")) is not None and not optimizer["groups"]:
        del optimizer["groups"]
    return chosen | {name: fields[name] for name in if_set if fields[name] is not None}
