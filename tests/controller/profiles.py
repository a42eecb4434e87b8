"""A real profile for the agent's double to answer with: that of a decoder of two small blocks.

Regenerate it with ``python -m tests.controller.profiles``; that takes torch, the tests do not.
"""

import functools
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Conditions,
    ModelProfile,
    NodeFacts,
    TensorParallelPlan,
)
from services.contract.messages.probing import ModelProbed, ProbeModel

ARGS: Final = {"dim": 32, "layers": 2, "heads": 2}
LENGTH: Final = 32
FACTS: Final = NodeFacts(
    matmul_flops={"fp32": 5e10, "bf16": 5e10},
    memory_bandwidth=1e10,
    link_bandwidth=1e9,
    network_bandwidth=1e8,
    collective_latency=1e-4,
    ranks=4,
)
_FILE: Final = Path(__file__).with_suffix(".json")
_ADAPTER: Final = TypeAdapter(ModelProfile)
_SPLITS: Final = (
    TensorParallelPlan(
        (
            "blocks.*.attention.query",
            "blocks.*.attention.key",
            "blocks.*.attention.value",
            "blocks.*.feed_forward.gate",
            "blocks.*.feed_forward.up",
        ),
        "colwise",
    ),
    TensorParallelPlan(("blocks.*.attention.out", "blocks.*.feed_forward.down"), "rowwise"),
)


@functools.cache
def profile() -> ModelProfile:
    """With and without recomputation, with matrices whole and split over two ranks."""
    return _ADAPTER.validate_json(_FILE.read_bytes())


def answer_to(question: ProbeModel, node_id: str = "loom-1") -> ModelProbed:
    """What a node would answer of that model."""
    return ModelProbed(
        probe_id=question.probe_id,
        node_id=node_id,
        took_s=1.5,
        profile=profile(),
        optimizer=ADAMW_FUSED,
        sequence_tokens=LENGTH,
    )


def _measure() -> ModelProfile:
    import torch  # noqa: PLC0415 only whoever writes the file needs it

    from fsdp_core.plan.profiling import profile_model  # noqa: PLC0415 as above
    from fsdp_core.plan.study import ModelUnderStudy  # noqa: PLC0415 as above
    from services.worker.rank.models.decoder import Decoder  # noqa: PLC0415 as above
    from services.worker.rank.models.loss import loss_of  # noqa: PLC0415 as above

    def loss(model: torch.nn.Module, micro_batch: int) -> torch.Tensor:
        tokens = torch.zeros(micro_batch, LENGTH + 1, dtype=torch.long)
        return loss_of(model)(tokens).loss

    study = ModelUnderStudy(lambda: Decoder(**ARGS), loss, tensor_parallel=_SPLITS)
    ways = [Conditions(recompute=again, tp=tp) for tp in (1, 2) for again in (False, True)]
    return profile_model(study, ways)


if __name__ == "__main__":
    _FILE.write_bytes(_ADAPTER.dump_json(_measure()) + b"\n")
