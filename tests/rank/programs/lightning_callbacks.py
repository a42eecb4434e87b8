"""Lightning's ``Trainer`` with all that its checkpoints hold beside a module. Arguments: steps, batches between validations."""

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from meshloom.integrations.lightning import MeshloomCallback

warnings.simplefilter("ignore")
STEPS, VALIDATED_EVERY = map(int, sys.argv[1:])


class Regression(LightningModule):
    """Its loss depends on how often it was asked, which its hooks keep, and its rate on evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.asked = 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002 Lightning's signature
        self.asked += 1
        return (1 + 0.1 * self.asked) * nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002 as above
        self.log("far", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["asked"] = self.asked + self.none_yet
        assert len(checkpoint["optimizer_states"]) == len(checkpoint["lr_schedulers"]) == 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.asked = checkpoint["asked"]
        assert "Decay" in checkpoint["callbacks"]
        del checkpoint["optimizer_states"]

    def on_train_start(self) -> None:
        self.none_yet = 0

    def configure_optimizers(self) -> Any:  # noqa: ANN401 its kind has no public name
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-1)
        # No evaluation is so much better than the one before.
        halving = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.99
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving, "monitor": "far"}}


class Data(LightningDataModule):
    """Shuffled samples, to which it adds what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        self.samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(self.samples, batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=16)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401, ARG002 Lightning's signature
        self.taken += 1
        return [batch[0] + 0.01 * self.taken, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict["taken"]


class Decay(Callback):
    """Decays weights more with each step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Trainer, *_: object, **__: object) -> None:
        self.steps += 1
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def main() -> None:
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        val_check_interval=VALIDATED_EVERY,
        callbacks=[EMAWeightAveraging(decay=0.5), MeshloomCallback(every=1), Decay()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regression(), datamodule=Data())


if __name__ == "__main__":
    main()
