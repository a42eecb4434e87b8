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
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"schedule.args.warmup_steps: {warmup_steps} is not in 0..{steps - 1}, "
            f"for a run of {steps} steps"
        )

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / warmup_steps
        done = min(1.0, (step - warmup_steps) / (steps - warmup_steps))
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0

    return factor
