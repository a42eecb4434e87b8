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
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from meshloom import session

_BESIDE: Final = "meshloom"
_AVERAGING: Final = getattr(callbacks, "WeightAveraging", ())  # older versions have none


class MeshloomCallback(Callback):
    """Reports steps and metrics, checkpoints, restores, and stops when the job is asked to.

    A checkpoint holds what Lightning's own has but hyperparameters: the module, optimizers and schedulers, the
    progress of the loops, the states of callbacks, data module and precision, and what hooks add
    (``on_save_checkpoint``), of several ranks those of the first; beside it the states of random numbers. It is taken
    when all is done for its step, a validation and hooks of the module included, that of an epoch's last step when all
    is done for the epoch. Lightning restores the position within an epoch: exactly if there is one rank and the data
    loader has ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``), else from the beginning of
    the loader's order.

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
        if not self._last.has_trained:
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
    """Behind all callbacks: a step is reported when they have done with it, and saved when all is done for it.

    Args:
        every: Steps between checkpoints.

    Attributes:
        has_trained: Whether it has seen a step: a later ``fit`` goes on with what there is.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._loops: _Resumed | None = None
        self._steps = 0
        self._awaits_epoch = False
        self._is_asked_to_stop = False
        self.has_trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._awaits_epoch = self._is_asked_to_stop = (
            False  # of an earlier fit, which an error ended
        )
        loops = _Resumed(trainer)
        state = {**_optimizers(trainer), "loops": loops}
        if not self.has_trained and session.restore(state) is not None:
            self._loops = loops
        steps: Any = trainer.fit_loop.epoch_loop

        def end_and_save(fetcher: Any) -> None:
            type(steps).on_advance_end(steps, fetcher)
            self._save_step(trainer, pl_module)

        # The module's hooks, a validation and schedulers that follow a metric come behind all callbacks.
        steps.on_advance_end = end_and_save

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
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        metrics: dict[str, Any] = {
            name: value for name, value in trainer.callback_metrics.items() if name != "loss"
        }
        total = _total(trainer)
        session.report(trainer.global_step, of=total, loss=loss, **metrics)

    def _save_step(self, trainer: Trainer, module: LightningModule) -> None:
        if self._loops is not None:
            self._loops.end_restart()  # hooks of the module have logged since
            self._loops = None
        if trainer.global_step == self._steps:
            return  # gradients wait for an update, and no checkpoint has them
        self._steps = trainer.global_step
        self.has_trained = True
        if trainer.is_last_batch:
            self._awaits_epoch = True
        else:
            self._save(trainer, module)
        if session.should_stop():
            trainer.should_stop = self._is_asked_to_stop = True

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
        has_stopped = trainer.should_stop and not self._is_asked_to_stop
        may_stop = trainer.fit_loop._can_stop_early  # noqa: SLF001 no public name says that min_epochs are done
        is_last |= (has_stopped and may_stop) or (total is not None and self._steps >= total)
        stays = has_stopped and not _is_late(trainer)
        loops = _Loops(trainer, is_whole_epoch=is_whole_epoch, has_stopped=stays)
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
        has_stopped: Whether a callback has ended the run.
    """

    def __init__(self, trainer: Trainer, *, is_whole_epoch: bool, has_stopped: bool) -> None:
        self._trainer: Any = trainer  # its types lack half of it
        self._is_whole_epoch = is_whole_epoch
        self._has_stopped = has_stopped

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
        metrics = trainer._logger_connector._callback_metrics  # noqa: SLF001 its property would end means too early
        named = () if module.automatic_optimization else module.named_parameters()
        gradients = {name: each.grad for name, each in named if each.grad is not None}
        beside = {
            "is_whole_epoch": self._is_whole_epoch,
            "has_stopped": self._has_stopped,
            "metrics": _of_the_first(trainer, dict(metrics)),
            "gathered": _of_the_first(trainer, _gathered(trainer)),
            "gradients": _of_the_first(trainer, gradients),
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
        self._has_started = False
        self._beside: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Of it nothing is filled in place, and hooks may lack what training brings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loop = self._trainer.fit_loop
        loop.load_state_dict({key: each for key, each in state.items() if key != _BESIDE})
        self._beside = state.get(_BESIDE, {})
        self._is_whole_epoch = self._beside.get("is_whole_epoch", False)
        if _BESIDE not in state and loop.epoch_loop.batch_progress.is_last_batch:
            # An older version saved an epoch's last step before the epoch was counted.
            self._is_whole_epoch = True
            for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
                counts.processed = counts.completed = counts.ready
        loop._restarting = True  # noqa: SLF001 its property says no at an epoch's end, and loaders lose their state
        loop._combined_loader = None  # noqa: SLF001 one that was made to count the steps would not get its state
        loop.run = self._run

    def _run(self) -> None:
        """A run of which no step is left ends with its averages in the place of weights, as it did.

        Other callbacks may not end what they have not begun.
        """
        trainer = self._trainer
        del trainer.fit_loop.run
        trainer.should_stop = trainer.should_stop or self._beside.get("has_stopped", False)
        trainer.fit_loop.run()
        if not self._has_started:
            for each in trainer.callbacks:
                if isinstance(each, _AVERAGING):
                    each.on_train_end(trainer, trainer.lightning_module)

    def start(self) -> None:
        """Nothing is left to be done of the step or the epoch; after an epoch's end loaders begin again."""
        self._has_started = True
        trainer = self._trainer
        steps = trainer.fit_loop.epoch_loop
        if self._is_whole_epoch:
            steps.restarting = False
            trainer.fit_loop.on_iteration_done()
        elif self._beside:

            def run_on(fetcher: Any) -> None:
                del steps.on_run_start
                steps.on_run_start(fetcher)
                steps.restarting = False

            steps.on_run_start = run_on
            for each in trainer.callbacks:
                if isinstance(each, callbacks.GradientAccumulationScheduler):
                    each.on_train_epoch_start(trainer)
        trainer._logger_connector._callback_metrics |= self._beside.get("metrics", {})  # noqa: SLF001 no public name sets it
        named = dict(trainer.lightning_module.named_parameters())
        for name, gradient in self._beside.get("gradients", {}).items():
            named[name].grad = _as_parameter(gradient, named[name])

    def end_restart(self) -> None:
        """From here on the epoch is one like all, with schedulers that follow a metric, and with all that it logged."""
        self._trainer.fit_loop._restarting = False  # noqa: SLF001 its property takes no for yes
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001 as below
        gathered = self._beside.get("gathered", {})
        for key in [key for key in gathered if key in results]:
            metric, saved = results[key], gathered.pop(key)
            is_extreme = metric.meta.is_max_reduction or metric.meta.is_min_reduction
            add = metric.meta.reduce_fx if is_extreme else torch.add
            for name, value in saved.items():
                setattr(metric, name, add(getattr(metric, name), value.to(metric.value.device)))


class _Nothing:
    """Has no state: to restore it restores random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _gathered(trainer: Any) -> dict[str, Any]:
    """What `self.log` has gathered of an epoch, but metrics of torchmetrics, which modules keep or lose."""
    return {
        key: {
            name: getattr(metric, name)
            for name in ("value", "cumulated_batch_size")
            if hasattr(metric, name)
        }
        for key, metric in trainer.fit_loop.epoch_loop._results.items()  # noqa: SLF001 no public name has it
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def _as_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    gradient = gradient.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    return gradient


def _is_late(trainer: Any) -> bool:
    """Whether the time of the run is over, as timers find again when it goes on: it may have got more."""
    timers = [each for each in trainer.callbacks if isinstance(each, callbacks.Timer)]
    remaining = [each.time_remaining() for each in timers]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)


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
    of = trainer.estimated_stepping_batches  # -1: of epochs of a stream
    return int(of) if 0 <= of < float("inf") else None


def _optimizers(trainer: Trainer) -> dict[str, Any]:
    return {
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
    }
