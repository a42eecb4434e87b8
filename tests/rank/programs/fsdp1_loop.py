"""A loop with PyTorch's FSDP1, which gathers copies of its slices for its state.

`--optimizer` has its state saved, too, and `--original` keeps the parameters, which are then slices themselves.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from meshloom import session

STEPS = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Linear(8, 1, bias=False),
    device_id=torch.device("cpu"),
    use_orig_params="--original" in sys.argv,
)
is_saved = "--optimizer" in sys.argv
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if is_saved else 0.0)
state: dict[str, Any] = {"model": model, "step": 0}
if is_saved:
    state["optimizer"] = optimizer
state = session.restore(state) or state
for step in range(state["step"] + 1, STEPS + 1):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step
    session.report(step, of=STEPS, loss=loss, samples=32)
    session.checkpoint(state, every=2)
dist.destroy_process_group()
