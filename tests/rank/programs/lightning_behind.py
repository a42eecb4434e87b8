"""Lightning's ``Trainer`` with what is done behind its callbacks. Argument: the kind of run."""

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from meshloom import session
from meshloom.integrations.lightning import MeshloomCallback

warnings.simplefilter("ignore")
KIND = sys.argv[1]
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Regression(LightningModule):
    """Decays its weights in a hook of its own; its rate follows the last validation at each second step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.automatic_optimization = KIND != "manual"

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("loss", loss)
        if KIND == "manual":
            often, rarely = self.optimizers()  # type: ignore[attr-defined]  # these are two
            self.manual_backward(loss)
            often.step()
            often.zero_grad()
            if batch_idx % 2 == 1:
                rarely.optimizer.step()  # is not counted
                rarely.zero_grad()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        if KIND != "older":  # they saved before
            with torch.no_grad():
                list(self.parameters())[-1].mul_(0.5)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002 Lightning's signature
        self.log("far", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:  # noqa: ANN401 its kind has no public name
        if KIND == "manual":
            return [torch.optim.SGD(each.parameters(), lr=1e-2) for each in self.net]
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        if KIND == "older":
            return optimizer
        # No validation is so much better than the one before.
        halving = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.99
        )
        scheduler = {"scheduler": halving, "monitor": "far", "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Stream(IterableDataset[list[torch.Tensor]]):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for each in INPUTS:
            yield [each, each.sum(0, keepdim=True)]


class Older(Callback):
    """Saves what versions did that had nothing beside the loops."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        session.report(trainer.global_step, loss=trainer.callback_metrics["loss"])
        state = {
            "module": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loops": trainer.fit_loop,
        }
        session.checkpoint(state, trainer.global_step)


def main() -> None:
    torch.manual_seed(1)
    samples = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))
    loaders = {
        "automatic": StatefulDataLoader(samples, batch_size=4, shuffle=True),
        "manual": StatefulDataLoader(samples, batch_size=4),
        "twice": StatefulDataLoader(samples, batch_size=4),
        "stream": DataLoader(Stream(), batch_size=4),
        "older": StatefulDataLoader(samples, batch_size=8),
    }
    callbacks: list[Callback] = [MeshloomCallback(every=4 if KIND == "stream" else 1)]
    attempts = os.environ["TORCHELASTIC_RESTART_COUNT"]  # noqa: TID251 a script reads it, as under torchrun
    if KIND == "older" and attempts == "0":
        callbacks = [Older()]
    if KIND == "automatic":
        # No mean of the losses of an epoch is so much better: the second epoch is the last one.
        callbacks += [
            EarlyStopping("mean", 2.0, patience=0, check_on_train_epoch_end=True),
            EMAWeightAveraging(decay=0.5),
        ]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs={"automatic": 3, "twice": 1, "older": 4}.get(KIND, 2),
        val_check_interval=2,
        limit_val_batches=0 if KIND == "older" else 1,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Regression()
    loader = loaders.get(KIND, DataLoader(samples, batch_size=4))
    trainer.fit(model, loader, DataLoader(samples, batch_size=16))
    if KIND == "twice":
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader, DataLoader(samples, batch_size=16))
    weights = sum(each.sum() for each in model.parameters())
    session.report(trainer.global_step, weights=weights)


if __name__ == "__main__":
    main()
