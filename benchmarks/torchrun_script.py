"""What ``benchmarks.first_step`` has torchrun start: the same decoder under torch's fully_shard."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from services.worker.rank.models.decoder import Decoder

_STEPS = 100_000
_LENGTH = 128


def main() -> None:
    """Trains, and writes the moment of each step of rank 0 into the given file."""
    steps = Path(sys.argv[1])
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]  # noqa: TID251 torchrun tells it nowhere else
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    model = Decoder(dim=192, layers=6, heads=6)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        tokens = torch.randint(256, (2, _LENGTH + 1))
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types there
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with steps.open("a") as file:
                file.write(f"{restart} {time.time()}\n")


if __name__ == "__main__":
    main()
