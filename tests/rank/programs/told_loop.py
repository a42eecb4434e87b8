"""A loop whose model computes with what follows from its state, and has another parameter once it is loaded.

The argument says by what it runs on two ranks: ``torch``'s FSDP2, ``ours``, or ``ddp``.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

import fsdp_core
from meshloom import session

STEPS = 4


class Fading(nn.Linear):
    """Answers less at each pass."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("passes", torch.zeros(()))
        self.rate = 1.0
        self.register_load_state_dict_post_hook(self.find_rate)  # type: ignore[no-untyped-call]  # PyTorch's

    def find_rate(self, *_: object) -> None:
        self.rate = 1.0 / (1.0 + float(self.passes))

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401 torch's
        self.weight = nn.Parameter(torch.empty_like(self.weight))
        super()._load_from_state_dict(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = super().forward(x) * self.rate
        self.passes += 1
        self.find_rate()
        return answer


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model: nn.Module = nn.Sequential(Fading(), nn.Tanh(), nn.Linear(8, 1))
wrap = {"torch": fsdp.fully_shard, "ours": fsdp_core.fully_shard, "ddp": DistributedDataParallel}
model = wrap[sys.argv[1]](model)  # type: ignore[operator]  # three of their own types
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
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
