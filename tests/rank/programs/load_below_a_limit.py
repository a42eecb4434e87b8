"""Loads saved weights, as one of four ranks or as the library does, with a limit on memory."""

import sys

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.fakes import fake_ranks
from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan
from services.worker.rank.models.hugging_face import hf_causal_lm
from services.worker.rank.models.materialise import give_values
from services.worker.rank.process.host_memory import limit_memory

RANKS = 4


def main(way: str, folder: str, limit: int) -> None:
    """Raises where the kernel refuses more memory."""
    _ = transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM  # imported when asked for
    limit_memory(limit)
    if way == "at_once":
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
        with torch.device("meta"):
            model = hf_causal_lm(model=folder)
        units = (UnitPlan(("model.layers.*",)),)
        apply_plan(model, ShardingPlan(MeshPlan(dp_shard=RANKS), units), mesh)
        model.to_empty(device="cpu")
        give_values(model, seed=3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
