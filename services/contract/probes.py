"""The name of a probe: the same for all questions to which the answer is the same."""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from fsdp_core.plan.model import PROFILE_VERSION
from services.contract.messages.probing import ProbeModel

_OF_THE_SPEC: Final = {"trainable", "model", "data", "loss", "optimizer"}
_OF_THE_TRAINING: Final = {"precision", "ema"}


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
            "spec": question.spec.model_dump(mode="json", include=_OF_THE_SPEC)
            | ({} if question.spec.code is None else {"code": question.spec.code}),
            "train": question.spec.train.model_dump(mode="json", include=_OF_THE_TRAINING),
            "question": question.model_dump(
                mode="json", exclude={"probe_id", "spec", "timeout_s", "memory_bytes"}
            ),
        },
        sort_keys=True,
    )
    return f"probe_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
