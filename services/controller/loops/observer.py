"""Who is told how long the leader's loops take."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass


def _nobody(_seconds: float) -> None:
    pass


@dataclass(frozen=True)
class Observer:
    """Called with seconds: of each look of the reconciler, and from a fact's arrival until it is handled.

    ``looking``: each look happens within.
    """

    looked: Callable[[float], None] = _nobody
    fact_handled: Callable[[float], None] = _nobody
    looking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
