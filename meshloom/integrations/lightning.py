"""Lightning's ``Trainer`` as a script of Meshloom.

::

    trainer = Trainer(callbacks=[MeshloomCallback(every=200)], enable_checkpointing=False, ...)
    trainer.fit(module, loader)

Under plain ``torchrun`` or ``python`` the callback does nothing.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from meshloom import session


class MeshloomCallback(Callback):
    """Reports steps and metrics, checkpoints, restores, and stops when the job is asked to.

    A checkpoint holds the module, its optimizers and schedulers, the progress of the loops and the
    states of random numbers. Lightning restores the position within an epoch: exactly if the data
    loader has ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``), else
    from the beginning of the loader's order.

    Args:
        every: Steps between checkpoints; 0: only when one is asked for, before a stop, and after the
            last step.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads what the checkpoint has."""
        session.restore(_state(trainer, pl_module))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Reports the step, if one was made; checkpoints; stops."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        metrics: dict[str, Any] = {
            name: value for name, value in trainer.callback_metrics.items() if name != "loss"
        }
        of = trainer.estimated_stepping_batches
        total = int(of) if of != float("inf") else None
        session.report(trainer.global_step, of=total, loss=loss, **metrics)
        is_last = total is not None and trainer.global_step >= total
        every = None if is_last else self._every
        if trainer.global_step:
            session.checkpoint(_state(trainer, pl_module), trainer.global_step, every=every)
        if session.should_stop():
            trainer.should_stop = True

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
        **__: Any,
    ) -> None:
        """A validation goes on."""
        if trainer.global_step:
            session.report(trainer.global_step)


def _state(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    return {
        "module": module,
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "loops": trainer.fit_loop,
    }
