"""The ``Trainer`` of Hugging Face transformers as a script of Meshloom.

::

    callback = MeshloomCallback(every=200)
    trainer = Trainer(model=..., args=TrainingArguments(save_strategy="no", ...), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))

Under plain ``torchrun`` the callback does nothing.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from meshloom import session

_FIGURES = ("loss", "grad_norm", "learning_rate")


class MeshloomCallback(TrainerCallback):
    """Reports steps and metrics, checkpoints, restores, and stops when the job is asked to.

    A checkpoint holds model, optimizer, scheduler, the trainer's state with that of callbacks (``ExportableState``), and
    the states of random numbers. It is taken when all is done for a step, evaluations included.
    A resumed run skips the batches that were trained on, as the trainer itself does when it resumes;
    so on as many ranks as before it goes on exactly.

    Args:
        every: Steps between checkpoints; 0: only when one is asked for, before a stop, and after the
            last step.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._is_restored = False
        self._awaits_first_step = False
        self._follows = False
        self._epoch_ends = False
        self._is_asked_to_stop = False
        self._has_stopped = False
        self._parts: dict[str, Any] = {}

    def resume_from(self, trainer: Trainer) -> str | None:
        """What ``trainer.train`` resumes from: None when the job starts over.

        Otherwise a folder with the trainer's state alone: the weights come from Meshloom's checkpoint,
        when the model is wrapped and the optimizer made.
        """
        self._follow(trainer)
        restored = session.restore({"trainer": ""})
        if restored is None:
            return None
        saved = json.loads(restored["trainer"])
        _give_back(trainer.callback_handler.callbacks, saved)
        self._has_stopped = _has_stopped_early(saved)
        self._is_restored = True
        folder = tempfile.mkdtemp(prefix="meshloom-")
        (Path(folder) / TRAINER_STATE_NAME).write_text(restored["trainer"])
        # There are no weights in the folder, and the trainer would look for them.
        trainer._load_from_checkpoint = _nothing  # type: ignore[method-assign]  # noqa: SLF001 what its subclasses override
        return folder

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Loads model, optimizer and scheduler."""
        self._parts = parts
        if self._is_restored:
            session.restore(_state(state, parts))
            self._awaits_first_step = True
            args.eval_on_start = False  # callbacks have heard of it

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Restores random numbers before a whole epoch draws of them."""
        if self._awaits_first_step and _is_whole(state):
            self._awaits_first_step = False
            session.restore({"trainer": ""})

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Restores random numbers after the skipped batches have been drawn."""
        if self._awaits_first_step:
            self._awaits_first_step = False
            session.restore({"trainer": ""})

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Reports the step, unless its loss is about to be logged."""
        if not control.should_log:
            session.report(state.global_step, of=state.max_steps, samples=_samples(args))
        if not self._follows:  # the script has not called ``resume_from``
            self._checkpoint(state, control, [])

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """What follows is done for the epoch."""
        self._epoch_ends = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        """Reports what is logged: of the step, of an evaluation or of the whole training."""
        numbers = {n: v for n, v in (logs or {}).items() if isinstance(v, int | float)}
        loss = numbers.pop("loss", None)
        of, samples = state.max_steps, _samples(args)
        session.report(state.global_step, of=of, loss=loss, samples=samples, **numbers)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """An evaluation goes on."""
        if state.global_step:
            session.report(state.global_step)

    def _follow(self, trainer: Trainer) -> None:
        """Has a checkpoint follow all that is done after a step: callbacks and schedulers hear of evaluations."""
        log_and_evaluate = trainer._maybe_log_save_evaluate  # noqa: SLF001 no callback is called behind it
        run_epoch = getattr(trainer, "_run_epoch", None)  # older versions have none

        def run_what_is_left(*args: Any, **kwargs: Any) -> None:
            # The trainer makes a step before it looks whether there are more.
            if self._has_stopped or trainer.state.global_step >= trainer.state.max_steps:
                trainer.control.should_training_stop = True
            else:
                cast("Callable[..., None]", run_epoch)(*args, **kwargs)

        def then_checkpoint(*args: Any, **kwargs: Any) -> None:
            log_and_evaluate(*args, **kwargs)
            # That of an epoch's last step waits until the epoch has been evaluated, and so does the last one of all.
            ends = _is_whole(trainer.state) or trainer.control.should_training_stop
            if self._epoch_ends or not ends:
                self._epoch_ends = False
                callbacks = trainer.callback_handler.callbacks
                self._checkpoint(trainer.state, trainer.control, callbacks)

        trainer._maybe_log_save_evaluate = then_checkpoint  # type: ignore[method-assign]  # noqa: SLF001 as above
        if run_epoch is not None:
            trainer._run_epoch = run_what_is_left  # type: ignore[method-assign]  # noqa: SLF001 as above
        self._follows = True

    def _checkpoint(
        self, state: TrainerState, control: TrainerControl, callbacks: Iterable[TrainerCallback]
    ) -> None:
        kept = defaultdict(list)
        for each in callbacks:
            if isinstance(each, ExportableState):
                kept[type(each).__name__].append(each.state())
        has_stopped = control.should_training_stop and not self._is_asked_to_stop
        kept[type(control).__name__] = [TrainerControl(should_training_stop=has_stopped).state()]
        states = cast("dict[str, Any]", state.stateful_callbacks)
        states |= {name: found if len(found) > 1 else found[0] for name, found in kept.items()}
        is_last = has_stopped or state.global_step >= state.max_steps
        every = None if is_last else self._every
        session.checkpoint(_state(state, self._parts), state.global_step, every=every)
        if session.should_stop():
            control.should_training_stop = self._is_asked_to_stop = True


def _give_back(callbacks: Iterable[TrainerCallback], state: dict[str, Any]) -> None:
    """Of callbacks, in place: the trainer makes others of them, by arguments that a subclass may lack or a script has changed."""
    saved = {
        name: list(found) if isinstance(found, list) else [found]
        for name, found in (state.get("stateful_callbacks") or {}).items()
    }
    for each in callbacks:
        of_its_class = saved.get(type(each).__name__)
        if isinstance(each, ExportableState) and of_its_class:
            for name, value in of_its_class.pop(0).get("attributes", {}).items():
                setattr(each, name, value)


def _has_stopped_early(state: dict[str, Any]) -> bool:
    """Whether a callback had ended the run; that all steps are made is seen by their number, which may have grown."""
    control = (state.get("stateful_callbacks") or {}).get(TrainerControl.__name__, {})
    has_stopped = control.get("args", {}).get("should_training_stop", False)
    return bool(has_stopped) and state["global_step"] < state["max_steps"]


def _samples(args: TrainingArguments) -> int:
    """Of a step, over all ranks."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _is_whole(state: TrainerState) -> bool:
    """Whether the last step was that of an epoch's end."""
    return float(state.epoch).is_integer()


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _state(state: TrainerState, parts: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TRAINER_STATE_NAME
        state.save_to_json(str(path))
        text = json.dumps(json.loads(path.read_text()))
    return {
        "model": parts["model"],
        "optimizer": parts["optimizer"],
        "scheduler": parts["lr_scheduler"],
        "trainer": text,
    }
