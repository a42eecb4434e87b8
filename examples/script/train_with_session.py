"""``train.py`` with three lines of Meshloom's session: report, checkpoint and restore, should_stop.

    torchrun --nproc-per-node 2 examples/script/train_with_session.py --steps 20
    meshloom submit examples/script/job.yaml

Under torchrun these lines do nothing.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshloom import session


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def build(dim: int, blocks: int, dropout: float) -> nn.Module:
    return nn.Sequential(*(Block(dim, dropout) for _ in range(blocks)), nn.Linear(dim, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)
    model = build(arguments.dim, 2, arguments.dropout).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    state = session.restore(state) or state
    for step in range(state["step"] + 1, arguments.steps + 1):
        # 8 samples a step over all ranks, the same ones however many ranks there are.
        make = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, arguments.dim, generator=make)
        wanted = inputs[:, :10].argmax(dim=1)
        share = slice(rank * 8 // world, (rank + 1) * 8 // world)
        loss = F.cross_entropy(model(inputs[share].to(device)), wanted[share].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        state["step"] = step
        if rank == 0:
            print(f"step {step} loss {float(mean) / world!r}")
        session.report(step, of=arguments.steps, loss=mean / world, samples=8)
        session.checkpoint(state, every=arguments.every)
        if session.should_stop():
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
