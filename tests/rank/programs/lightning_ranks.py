"""Lightning's ``Trainer`` on two ranks, whose callbacks keep what each rank has measured. Argument: steps."""

import sys
import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshloom.integrations.lightning import MeshloomCallback

warnings.simplefilter("ignore")
STEPS = int(sys.argv[1])


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002 Lightning's signature
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Measured(Callback):
    """As ``ModelCheckpoint`` keeps its best, by a metric that is not synchronized."""

    def __init__(self) -> None:
        self.best: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: object, **__: object) -> None:
        self.best = {f"of-rank-{trainer.global_rank}": torch.tensor(float(trainer.global_step))}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert list(state_dict["best"]) == ["of-rank-0"]


def main() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(16, 4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        callbacks=[MeshloomCallback(every=1), Measured()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.fit(
        Regression(), DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    )


if __name__ == "__main__":
    main()
