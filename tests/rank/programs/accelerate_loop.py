"""A loop with accelerate, its tracker and the session. Arguments: steps, every."""

import sys
import warnings

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]  # it has no types
from torch import nn

from meshloom import session
from meshloom.integrations.accelerate import MeshloomTracker

warnings.simplefilter("ignore")
STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])


def main() -> None:
    accelerator = Accelerator(cpu=True, log_with=MeshloomTracker(of=STEPS))
    accelerator.init_trackers("run")
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    state = session.restore(state) or state
    for step in range(state["step"] + 1, STEPS + 1):
        torch.manual_seed(step)
        inputs = torch.randn(8, 4)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] = step
        accelerator.log({"loss": loss.detach(), "rate": scheduler.get_last_lr()[0]}, step=step)
        session.checkpoint(state, every=EVERY)
        if session.should_stop():
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
