"""The ``Trainer`` of Hugging Face transformers as a script of Meshloom.

::

    callback = MeshloomCallback(every=200)
    trainer = Trainer(model=..., args=TrainingArguments(save_strategy="no", ...), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))

Under plain ``torchrun`` the callback does nothing.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from meshloom import session

_FIGURES = ("loss", "grad_norm", "learning_rate")


class MeshloomCallback(TrainerCallback):
    """Reports steps and metrics, checkpoints, restores, and stops when the job is asked to.

    A checkpoint holds model, optimizer, scheduler, the trainer's state and the states of random numbers.
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

    def resume_from(self, trainer: Trainer) -> str | None:
        """What ``trainer.train`` resumes from: None when the job starts over.

        Otherwise a folder with the trainer's state alone: the weights come from Meshloom's checkpoint,
        when the model is wrapped and the optimizer made.
        """
        restored = session.restore({"trainer": ""})
        if restored is None:
            return None
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
        if self._is_restored:
            session.restore(_state(state, parts))
            self._awaits_first_step = True

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
        """Reports the step, unless its loss is about to be logged; checkpoints; stops."""
        if not control.should_log:
            session.report(state.global_step, of=state.max_steps, samples=_samples(args))
            self._checkpoint(state, control, parts)

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
        if loss is not None:
            self._checkpoint(state, control, parts)

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

    def _checkpoint(
        self, state: TrainerState, control: TrainerControl, parts: dict[str, Any]
    ) -> None:
        is_last = state.global_step >= state.max_steps
        every = None if is_last else self._every
        session.checkpoint(_state(state, parts), state.global_step, every=every)
        if session.should_stop():
            control.should_training_stop = True


def _samples(args: TrainingArguments) -> int:
    """Of a step, over all ranks."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


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
