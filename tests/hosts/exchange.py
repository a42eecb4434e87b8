"""Two ranks on each of two hosts train with the engine: ``exchange.py HOST STORE_ADDRESS STORE_PORT FOLDER``.

Once as usual, and once with gathers that one rank of each host uses and the other one drops while they are in flight:
who drops one still takes part in the host's exchange of what came, or the other rank would wait for ever. Also, a forward raises while the next unit's gather is in flight. Each
rank writes what it has at the end of both, in bytes, into FOLDER.
"""

import contextlib
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import SharedMemoryPolicy, fully_shard
from fsdp_core.comm import HostwiseCollectives
from tests.engine.sharded import state, unit

RANKS: Final = 4
STEPS: Final = 3


def main() -> None:
    host, address, port, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    fork = multiprocessing.get_context("fork")  # torch is imported once for both
    ranks = [
        fork.Process(target=run, args=(2 * host + local, address, port, folder))
        for local in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def run(rank: int, address: str, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    store = dist.TCPStore(address, port, RANKS, is_master=rank == 0, timeout=patience)  # type: ignore[attr-defined]  # PyTorch exports it implicitly
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    for name, drops in (("plain", False), ("dropped", True)):
        (folder / f"{name}-{rank}").write_bytes(trained(rank, drops=drops))
    dist.barrier()
    dist.destroy_process_group()


def trained(rank: int, *, drops: bool) -> bytes:
    """The losses and this rank's slices after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 4))
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, shared_memory=SharedMemoryPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        batch = torch.arange(14.0).view(2, 7).add(rank + step).sin()
        if drops and step:
            _drop(rank, model, batch)
        loss = model(batch).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().view(1))
    groups = [group for layer in (model[0], model[2], model[3]) for group in state(layer).groups]
    assert all(isinstance(group._new_route().shards, HostwiseCollectives) for group in groups)
    slices = [value.to_local().detach().flatten() for value in model.state_dict().values()]
    return torch.cat([*seen, *slices]).numpy().tobytes()


def _drop(rank: int, model: nn.Sequential, batch: torch.Tensor) -> None:
    handle = unit(model[3]).unshard(async_op=True)
    if rank % 2 and handle is not None:  # the other rank of its host drops the same gather
        handle.wait()
    unit(model[3]).reshard()
    hook = model[0].register_forward_hook(_raise)
    with contextlib.suppress(ArithmeticError):
        model(batch)
    hook.remove()
    unit(model).reset_iter_state()


def _raise(*_: object) -> None:
    raise ArithmeticError("on purpose")


if __name__ == "__main__":
    main()
