"""A tracker for Hugging Face accelerate: what the script logs, Meshloom shows.

::

    accelerator = Accelerator(log_with=MeshloomTracker(of=steps))
    accelerator.init_trackers("run")
    accelerator.log({"loss": loss}, step=step)

The rest of the session is called as in any script: ``session.restore``, ``session.checkpoint`` (with
what ``accelerator.prepare`` returned) and ``session.should_stop``.
"""

from typing import Any

from accelerate.tracking import GeneralTracker  # type: ignore[import-untyped]  # it has no types

from meshloom import session


class MeshloomTracker(GeneralTracker):  # type: ignore[misc]  # as above
    """Reports the numbers that are passed to ``accelerator.log``.

    Args:
        of: How many steps there will be; for the ETA.
    """

    name = "meshloom"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, of: int | None = None) -> None:
        super().__init__()
        self._of = of
        self._step = 0

    @property
    def tracker(self) -> Any:
        """The module that is reported to."""
        return session

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Does nothing: the spec has the configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Reports the numbers; without ``step``, of one step more than the last time."""
        self._step = self._step + 1 if step is None else step
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        session.report(self._step, of=self._of, **numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0
