"""A script for `torch.distributed.fsdp` runs on with nothing but its import changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # PyTorch does not list it

pytestmark = [pytest.mark.ranks, pytest.mark.system]

ROOT = Path(__file__).parents[2]
IMPORT = "from torch.distributed.fsdp import"
SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab=19, width=10, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        return self.head(self.features(tokens))

    def features(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def reset_parameters(self):
        torch.manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=OffloadPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    model.to_empty(device="cpu")
    model.reset_parameters()
    register_fsdp_forward_method(model, "features")
    for first, second in zip(model.blocks, model.blocks[1:]):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        for micro in range(2):
            last = micro == 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            tokens = torch.randint(19, (4, 9), generator=generator)
            handle = model.unshard(async_op=True)
            assert isinstance(handle, UnshardHandle)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            print("loss", step, micro, loss.item().hex())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        print("norm", step, norm.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        print("features", model.features(tokens).float().sum().item().hex())
    for name, parameter in model.state_dict().items():
        print(name, tuple(parameter.shape), parameter.full_tensor().double().sum().item().hex())
    dist.barrier()
    os._exit(0)


main()
"""


def test_a_script_prints_the_same_with_only_its_import_changed(tmp_path: Path) -> None:
    assert SCRIPT.count(IMPORT) == 1
    original = tmp_path / "original.py"
    original.write_text(SCRIPT)
    changed = tmp_path / "changed.py"
    changed.write_text(SCRIPT.replace(IMPORT, "from fsdp_core import"))

    expected = run_on_two_ranks(original)
    assert run_on_two_ranks(changed) == expected
    assert sum(line.startswith("loss") for line in expected[0]) == 8
    assert expected[0] != expected[1]


def run_on_two_ranks(script: Path) -> list[list[str]]:
    """What each rank printed, with the environment that torchrun gives."""
    # As torchrun does: the store's server is not in a rank, and its port is the kernel's choice.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", str(script)],
            env={
                **os.environ,  # noqa: TID251 - a child's environment is this one's and torchrun's
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    return [out.splitlines() for out, _ in outputs]
