"""Lightning's ``Trainer`` as a script of Meshloom.

::

    trainer = Trainer(callbacks=[MeshloomCallback(every=200)], enable_checkpointing=False, ...)
    trainer.fit(module, loader)

Under plain ``torchrun`` or ``python`` the callback does nothing.
"""

import copy
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from meshloom import session

_BESIDE: Final = "meshloom"


class MeshloomCallback(Callback):
    """Reports steps and metrics, checkpoints, restores, and stops when the job is asked to.

    A checkpoint holds what Lightning's own has but hyperparameters: the module, optimizers and schedulers, the
    progress of the loops, the states of callbacks, data module and precision, and what hooks add
    (``on_save_checkpoint``), of several ranks those of the first; beside it the states of random numbers. It is taken
    after the validation that is due at its step, that of an epoch's last step when all is done for the epoch. Lightning
    restores the position within an epoch: exactly if there is one rank and the data loader has ``state_dict`` and
    ``load_state_dict`` (torchdata's ``StatefulDataLoader``), else from the beginning of the loader's order.

    Args:
        every: Steps between checkpoints; 0: only when one is asked for, before a stop, and after the
            last step.
    """

    def __init__(self, every: int = 0) -> None:
        self._last = _Last(every)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes two places: before all callbacks, which begin with their states, and behind them."""
        parts: Any = trainer
        others = [each for each in parts.callbacks if each not in (self, self._last)]
        parts.callbacks = [self, *others, self._last]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the module, and what others have beside the loops."""
        session.restore({"module": pl_module, "loops": _Beside(trainer)})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checkpoints the epoch that has ended."""
        self._last.save_epoch(trainer, pl_module, is_last=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checkpoints before others put averages in the place of weights."""
        self._last.save_epoch(trainer, pl_module, is_last=True)

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


class _Last(Callback):
    """Behind all callbacks: a step is reported and saved when they have done with it.

    Args:
        every: Steps between checkpoints.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._loops: _Resumed | None = None
        self._steps = 0
        self._awaits_epoch = False
        self._awaits_validation = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._awaits_epoch = self._awaits_validation = (
            False  # of an earlier fit, which an error ended
        )
        loops = _Resumed(trainer)
        if session.restore({**_optimizers(trainer), "loops": loops}) is not None:
            self._loops = loops

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        if self._loops is not None:
            self._loops.start()
            session.restore({"loops": _Nothing()})  # loaders have drawn random numbers to begin

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._loops is not None:
            self._loops.end_restart()
            self._loops = None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        metrics: dict[str, Any] = {
            name: value for name, value in trainer.callback_metrics.items() if name != "loss"
        }
        total = _total(trainer)
        session.report(trainer.global_step, of=total, loss=loss, **metrics)
        if trainer.global_step == self._steps:
            return  # gradients wait for an update, and no checkpoint has them
        self._steps = trainer.global_step
        if trainer.is_last_batch:
            self._awaits_epoch = True
        elif _validates_now(trainer):
            self._awaits_validation = True
        else:
            self._save(trainer, pl_module)
        if session.should_stop():
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._awaits_validation and trainer.state.fn is TrainerFn.FITTING:
            self._awaits_validation = False
            self._save(trainer, pl_module)

    def save_epoch(self, trainer: Trainer, module: LightningModule, *, is_last: bool) -> None:
        """Checkpoints after an epoch's last step, if that waits for it."""
        if self._awaits_epoch:
            self._awaits_epoch = False
            self._save(trainer, module, is_last=is_last, is_whole_epoch=True)

    def _save(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        is_last: bool = False,
        is_whole_epoch: bool = False,
    ) -> None:
        total = _total(trainer)
        is_last = is_last or (total is not None and self._steps >= total)
        loops = _Loops(trainer, is_whole_epoch=is_whole_epoch)
        state = {"module": module, **_optimizers(trainer), "loops": loops}
        session.checkpoint(state, self._steps, every=None if is_last else self._every)


class _Beside:
    """What callbacks, the data module, the precision and hooks have for a checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # its types lack half of it

    def state_dict(self) -> dict[str, Any]:
        """Of it nothing is filled in place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        saved = state.get(_BESIDE)
        if saved is None:  # an older version saved the loops alone
            return
        progress = {key: each for key, each in state.items() if key != _BESIDE}
        whole = _as_lightning_saves(trainer, progress, saved["callbacks"])
        own = dict.fromkeys(saved["weights"], whole["state_dict"])
        checkpoint = {**whole, **saved["hooks"], **own}
        module.on_load_checkpoint(checkpoint)
        if trainer.datamodule is not None and saved["data"]:
            trainer.datamodule.load_state_dict(saved["data"])
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, module, checkpoint)
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])


class _Loops:
    """The progress of the loops for a checkpoint, and beside it all that ``_Beside`` takes back.

    Args:
        trainer: Lightning's.
        is_whole_epoch: Whether all is done for the last epoch.
    """

    def __init__(self, trainer: Trainer, *, is_whole_epoch: bool) -> None:
        self._trainer: Any = trainer  # its types lack half of it
        self._is_whole_epoch = is_whole_epoch

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        progress = copy.deepcopy(trainer.fit_loop.state_dict())
        if self._is_whole_epoch:  # the next one may have been counted as ready
            for counts in progress["epoch_progress"].values():
                counts["ready"] = counts["completed"]
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        states = {key: state for key, state in states.items() if state}
        whole = _as_lightning_saves(trainer, progress, states)
        weights = whole["state_dict"]
        hooks: dict[str, Any] = {
            **whole,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, hooks)
        module.on_save_checkpoint(hooks)
        added = {
            key: value
            for key, value in hooks.items()
            if value is not weights and (key not in whole or value is not whole[key])
        }
        data = {} if trainer.datamodule is None else trainer.datamodule.state_dict()
        beside = {
            "is_whole_epoch": self._is_whole_epoch,
            "callbacks": _of_the_first(trainer, states),
            "data": _of_the_first(trainer, data),
            "precision": trainer.precision_plugin.state_dict(),
            "weights": [key for key, value in hooks.items() if value is weights],
            "hooks": _of_the_first(trainer, added),
        }
        return {**progress, _BESIDE: beside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError  # ``_Resumed`` loads


class _Resumed:
    """Takes the progress of the loops back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # its types lack half of it
        self._is_whole_epoch = False

    def state_dict(self) -> dict[str, Any]:
        """Of it nothing is filled in place, and hooks may lack what training brings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self._trainer.fit_loop
        loop.load_state_dict({key: each for key, each in state.items() if key != _BESIDE})
        self._is_whole_epoch = state.get(_BESIDE, {}).get("is_whole_epoch", False)
        loop._restarting = True  # noqa: SLF001 its property says no at an epoch's end, and loaders lose their state

    def start(self) -> None:
        """After an epoch's end nothing of it is left to be done, and loaders begin again."""
        if self._is_whole_epoch:
            self._trainer.fit_loop.epoch_loop.restarting = False
            self._trainer.fit_loop.on_iteration_done()

    def end_restart(self) -> None:
        """From here on the epoch is one like all, with schedulers that follow a metric."""
        self._trainer.fit_loop._restarting = False  # noqa: SLF001 its property takes no for yes


class _Nothing:
    """Has no state: to restore it restores random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _validates_now(trainer: Trainer) -> bool:
    """Whether a validation follows this step. By the clock (``val_check_interval`` as a time) ranks may differ."""
    of_trainer: Any = trainer
    steps = of_trainer.fit_loop.epoch_loop
    is_by_time = of_trainer._val_check_time_interval is not None  # noqa: SLF001 no public name says so
    is_due = steps._should_check_val_fx(of_trainer.fit_loop._data_fetcher)  # noqa: SLF001 as above
    is_empty = steps.val_loop._combined_loader is not None and steps.val_loop.skip  # noqa: SLF001 as above
    return is_due and not is_by_time and not is_empty


def _as_lightning_saves(
    trainer: Any,
    progress: Mapping[str, Any],
    callbacks: Mapping[str, Any],
) -> dict[str, Any]:
    """What hooks find in a checkpoint of Lightning's own; of it nothing is saved twice."""
    module = trainer.lightning_module
    params = {module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)} if module.hparams else {}
    return {
        "pytorch-lightning_version": version("lightning"),
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": dict(progress)},
        "callbacks": dict(callbacks),
        "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        **params,
    }


def _of_the_first(trainer: Any, part: dict[str, Any]) -> dict[str, Any]:
    """``part``, of the first rank where others have other tensors, as with metrics of each rank's own.

    A checkpoint has what the first has, as one of Lightning's own does.
    """
    leaves, _ = tree_flatten_with_path(part)
    tensors = [(keystr(path), each) for path, each in leaves if isinstance(each, torch.Tensor)]
    outline = [(path, each.shape, each.dtype) for path, each in tensors]
    is_alike = trainer.strategy.broadcast(outline) == outline
    if trainer.strategy.reduce_boolean_decision(is_alike, all=True):
        return part
    if trainer.is_global_zero:
        part = tree_map_only(torch.Tensor, lambda each: each.detach().cpu(), part)
    first: dict[str, Any] = trainer.strategy.broadcast(part)
    return first


def _total(trainer: Trainer) -> int | None:
    of = trainer.estimated_stepping_batches
    return int(of) if of != float("inf") else None


def _optimizers(trainer: Trainer) -> dict[str, Any]:
    return {
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
    }
