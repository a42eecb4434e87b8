"""Learning-rate schedules by short name.

A schedule factory takes the arguments of ``schedule.args`` and, if it has a parameter of that
name which ``schedule.args`` leaves out, ``steps`` (those of the whole run), and returns a function
from the step, counted from 1, to the factor by which the optimizer's learning rates are
multiplied. It has no state, so there is none to save.
"""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """Always 1."""
    return lambda _: 1.0


def warmup_cosine(warmup_steps: int = 0, floor: float = 0.1, *, steps: int) -> Schedule:
    """Rises linearly to 1 over ``warmup_steps``, then falls on half a cosine to ``floor``.

    Source: Loshchilov and Hutter 2016 (arXiv:1608.03983), without restarts.

    Raises:
        ValueError: The warm-up is negative or as long as the run.
    """
    _check_warmup(warmup_steps, steps)

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / warmup_steps
        done = min(1.0, (step - warmup_steps) / (steps - warmup_steps))
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0

    return factor


def linear(warmup_steps: int = 0, floor: float = 0.0, *, steps: int) -> Schedule:
    """Rises linearly to 1 over ``warmup_steps``, then falls linearly to ``floor`` at the last step.

    Raises:
        ValueError: The warm-up is negative or as long as the run.
    """
    _check_warmup(warmup_steps, steps)

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / warmup_steps
        done = min(1.0, (step - warmup_steps) / (steps - warmup_steps))
        return 1.0 - (1.0 - floor) * done

    return factor


def wsd(
    warmup_steps: int = 0, decay_steps: int | None = None, floor: float = 0.0, *, steps: int
) -> Schedule:
    """Warm-up, stable, decay: rises linearly to 1, stays there, and falls linearly to ``floor``.

    Source: Hu et al. 2024 (arXiv:2404.06395).

    Args:
        warmup_steps: Of the rise.
        decay_steps: Of the fall, with which the run ends; None: a tenth of the run, rounded up.
        floor: What is left at the last step.
        steps: Of the run.

    Raises:
        ValueError: The warm-up is negative or as long as the run, or no room is left for the decay.
    """
    _check_warmup(warmup_steps, steps)
    falling = min(-(-steps // 10), steps - warmup_steps) if decay_steps is None else decay_steps
    if not 1 <= falling <= steps - warmup_steps:
        raise ValueError(
            f"schedule.args.decay_steps: {falling} is not in 1..{steps - warmup_steps}, for a run "
            f"of {steps} steps of which {warmup_steps} are the warm-up"
        )

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / warmup_steps
        done = min(1.0, max(0, step - (steps - falling)) / falling)
        return 1.0 - (1.0 - floor) * done

    return factor


def one_cycle(
    rise: float = 0.3, start: float = 0.04, floor: float = 4e-6, *, steps: int
) -> Schedule:
    """Rises on half a cosine from ``start`` to 1, then falls on one to ``floor`` at the last step.

    Source: Smith and Topin 2017 (arXiv:1708.07120), with the defaults of
    ``torch.optim.lr_scheduler.OneCycleLR``; momentum stays as it is.

    Args:
        rise: Part of the run in which it rises, between 0 and 1.
        start: Factor at the first step.
        floor: Factor at the last.
        steps: Of the run.

    Raises:
        ValueError: ``rise`` is not between 0 and 1.
    """
    if not 0.0 < rise < 1.0:
        raise ValueError(f"schedule.args.rise: {rise} is not between 0 and 1")
    last = steps - 1
    top = max(rise * steps - 1.0, 0.0)

    def factor(step: int) -> float:
        place = min(step - 1, last)
        if place < top:
            return _on_cosine(start, 1.0, place / top)
        return _on_cosine(1.0, floor, (place - top) / (last - top)) if last > top else 1.0

    return factor


def _on_cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * (1.0 + math.cos(math.pi * done)) / 2.0


def _check_warmup(warmup_steps: int, steps: int) -> None:
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"schedule.args.warmup_steps: {warmup_steps} is not in 0..{steps - 1}, "
            f"for a run of {steps} steps"
        )
