"""What a script may ask of Meshloom: any torchrun script, with three additional lines.

::

    from meshloom import session

    state = {"model": model, "optimizer": optimizer, "step": 0}
    state = session.restore(state) or state
    for step in range(state["step"] + 1, steps + 1):
        loss = train_step(...)
        state["step"] = step
        session.report(step, of=steps, loss=loss)
        session.checkpoint(state, every=100)
        if session.should_stop():
            break

Without Meshloom, under plain ``torchrun`` or ``python``, these calls do nothing: ``report``
returns, ``checkpoint`` saves nothing and answers False, ``restore`` answers None, ``should_stop``
False. So one script serves both.

``report`` may be called on any ranks; what rank 0 reports is shown. The three others are collective:
every rank calls them, at the same points of the script.
"""

from typing import Any, Protocol


class Backend(Protocol):
    """Implements the calls of a script. Meshloom's ranks install one before it starts."""

    def report(self, step: int, figures: "Figures", metrics: dict[str, Any]) -> None:
        """See ``report``."""
        ...

    def checkpoint(self, state: Any, step: int | None, every: int | None) -> bool:  # noqa: ANN401 (any nesting)
        """See ``checkpoint``."""
        ...

    def restore(self, state: Any) -> Any:  # noqa: ANN401 (any nesting)
        """See ``restore``."""
        ...

    def should_stop(self) -> bool:
        """See ``should_stop``."""
        ...


class Figures:
    """The arguments of ``report`` except its metrics; None if not given.

    Args:
        loss: Of the step.
        of: How many steps there will be.
        tokens: That the step trained on, over all ranks.
        samples: The same in samples, where these are no tokens.
    """

    def __init__(
        self,
        loss: Any,  # noqa: ANN401 (a number, or a tensor with one element)
        of: int | None,
        tokens: float | None,
        samples: float | None,
    ) -> None:
        self.loss = loss
        self.of = of
        self.tokens = tokens
        self.samples = samples


_installed: list[Backend] = []


def install(backend: Backend) -> None:
    """Makes ``backend`` answer from now on. Only Meshloom's ranks call it."""
    _installed[:] = [backend]


def report(
    step: int,
    *,
    loss: Any = None,  # noqa: ANN401 (a number, or a tensor with one element)
    of: int | None = None,
    tokens: float | None = None,
    samples: float | None = None,
    **metrics: Any,  # noqa: ANN401 as above
) -> None:
    """Reports that ``step`` steps are done, and the figures of the last one.

    From the first report on a job has curves, a speed and an ETA, and its ranks are ended as
    hanging when none of them reports, checkpoints or asks for as long as ``faults.hang_timeout_s``;
    ``auto`` is a minute, or three usual times between two reports if that is longer. A second
    report of the same step (with an evaluation's metrics, or without any) extends that by five
    minutes. Before the first report, hangs are not detected.

    Args:
        step: How many steps are done, counted from 1 over all attempts of the job. A second report of
            the same step adds metrics to it; one of step 0 has metrics alone.
        loss: Of the step.
        of: How many steps there will be; for the ETA. ``train.steps`` of the spec serves as well.
        tokens: That the step trained on, over all ranks; for the speed.
        samples: The same where these are no tokens.
        metrics: Further numbers by name. ``grad_norm`` and ``learning_rate`` are shown separately.

    Raises:
        ValueError: The step is less than one that was reported, or is not a whole number.
        TypeError: A metric is not a number.
    """
    if _installed:
        _installed[0].report(step, Figures(loss, of, tokens, samples), metrics)


def checkpoint(state: Any, step: int | None = None, *, every: int | None = None) -> bool:  # noqa: ANN401 (any nesting)
    """Saves ``state``: starts to write it, and commits it once all ranks have written.

    It is copied before this returns, so that the script may change it at once; it is written while
    the script goes on (with ``checkpoint.mode: sync``, before this returns). Until it is committed it does
    not exist: then the job resumes from it, at any number of ranks. The states of the generators of
    random numbers (Python's, NumPy's, PyTorch's) are saved beside it.

    Args:
        state: Any nesting of dicts (keys are strings or whole numbers), lists and tuples of tensors,
            DTensors, numbers, strings, None, and objects with ``state_dict`` and ``load_state_dict``:
            modules, optimizers, schedulers. Of DTensors each rank saves its own elements. Anything else
            must be the same on all ranks: it is saved once, by rank 0. Nothing is pickled.
        step: How many steps are done; if left out, the last one that any rank reported. A step that is
            saved already is not saved again.
        every: Save only at multiples of this (``checkpoint.every_steps`` of the spec, if set,
            overrides it), and whenever a user or a stop requests a checkpoint, so the call can be
            in the loop. None: save now.

    Returns:
        Whether saving was started.

    Raises:
        TypeError: Something in ``state`` cannot be saved; the error has its path.
        ValueError: The ranks have different things in ``state``, or no step is known.
    """
    return _installed[0].checkpoint(state, step, every) if _installed else False


def restore(state: Any) -> Any:  # noqa: ANN401 (any nesting)
    """Loads the checkpoint from which this attempt of the job resumes.

    Args:
        state: As for ``checkpoint``. Its tensors and objects are filled in place; DTensors at any
            number of ranks. Tensors and objects that its outermost dict lacks are left out, and the log
            names them; what came into it in training otherwise, or into a dict within it, comes back.

    A part of what was saved may be asked for, and any number of times.

    Returns:
        None if the job starts over; else ``state`` as it was saved: the same tensors and objects,
        and the saved numbers, strings and lists in the place of those in ``state``.

    Raises:
        KeyError: The checkpoint lacks something that is in ``state``; the error has its path.
        Exception: The checkpoint is corrupt, or has tensors of other shapes or dtypes.
    """
    return _installed[0].restore(state) if _installed else None


def should_stop() -> bool:
    """Whether the script should end now: for a pause, drain, cancellation or preemption.

    All ranks get the same answer. A script that then ends with code 0 leaves its job paused (or as
    requested), and the job continues later from its last checkpoint. Save one first, unless
    ``checkpoint(state, every=...)`` is in the loop, which does so by itself. A script that never
    calls this is killed at the end of the stop's grace period.
    """
    return _installed[0].should_stop() if _installed else False
