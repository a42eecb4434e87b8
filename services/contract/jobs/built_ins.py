"""The short names that a spec may say instead of ``package.module:callable``, by field.

The ranks' registry must have exactly these; the controller refuses all others when it is asked.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

BUILT_IN_NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "trainable": frozenset(),
        "model": frozenset({"decoder", "hf_causal_lm", "hf_sequence_classification"}),
        "data": frozenset({"hf_dataset", "stdlib_bytes", "tokens"}),
        "loss": frozenset({"bce_with_logits", "cross_entropy", "mse", "next_token"}),
        "optimizer": frozenset({"adamw", "muon", "sgd"}),
        "schedule": frozenset({"constant", "linear", "one_cycle", "warmup_cosine", "wsd"}),
        "evaluation.metrics": frozenset({"accuracy", "next_token_accuracy"}),
    }
)
