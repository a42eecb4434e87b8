"""Lightning's ``Trainer`` on a small regression, with the callback. Arguments: steps, every."""

import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshloom.integrations.lightning import MeshloomCallback

warnings.simplefilter("ignore")
STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002 Lightning's signature
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("error", loss.sqrt())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(16, 4)
    # An epoch of 2 steps: a checkpoint of an even step is one of an epoch's end.
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=[MeshloomCallback(every=EVERY)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
