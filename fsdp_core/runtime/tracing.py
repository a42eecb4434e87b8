"""What profilers and logs see of a unit's phases."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fsdp_core import torch_private

_LOGGER = logging.getLogger("fsdp_core")
_NOTHING: AbstractContextManager[object] = nullcontext()


class UnitTracer:
    """Names a unit's phases in profiles and, at level DEBUG, in the log of `fsdp_core`.

    The names are the reference's, `FSDP::all_gather (layers.0)`, for that is what people search
    their traces for.

    Attributes:
        fqn: Names of the unit's modules from the root, joined by ", "; "" for a root.
    """

    def __init__(self) -> None:
        self.fqn = ""

    def span(self, what: str) -> AbstractContextManager[object]:
        """A span in the profile that is being recorded, if any.

        Entering a span costs about 5 us even when nobody records it, which is why it is asked
        first.
        """
        return record_function(self._label(what)) if torch_private.is_profiling() else _NOTHING

    def phase(self, what: str) -> AbstractContextManager[object]:
        """A span whose beginning is also logged."""
        if _LOGGER.isEnabledFor(logging.DEBUG):
            _LOGGER.debug("%s", self._label(what))
        return self.span(what)

    def _label(self, what: str) -> str:
        return f"FSDP::{what} ({self.fqn})" if self.fqn else f"FSDP::{what}"
