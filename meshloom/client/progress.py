"""A job's progress while one waits for it: one live line in a notebook, plain lines elsewhere."""

import html
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from services.contract.api.views import JobView
from services.contract.words.control_characters import one_line

Show = Callable[[JobView], None]


class _DisplayHandle(Protocol):
    def update(self, shown: object) -> None: ...


class ProgressLine:
    """What of a job is shown, as text and as HTML: the two forms that a notebook asks for."""

    def __init__(self, job: JobView) -> None:
        self._job = job

    def __repr__(self) -> str:
        return progress_text(self._job)

    def _repr_html_(self) -> str:
        progress = self._job.progress
        bar = ""
        if progress.of:
            bar = f'<progress value="{progress.step}" max="{progress.of}"></progress> '
        return f"<div>{bar}{html.escape(progress_text(self._job))}</div>"


def progress_text(job: JobView) -> str:
    """Name, state, step, loss, throughput and time left, in one line that a terminal only shows."""
    progress = job.progress
    total = "?" if progress.of is None else str(progress.of)
    parts = [f"{job.name} {job.state}", f"step {progress.step}/{total}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} {progress.throughput_unit}/s")
    if progress.eta_s is not None:
        parts.append(f"{progress.eta_s:.0f} s left")
    if job.reason:
        parts.append(job.reason)
    return one_line("  ".join(parts))


@contextmanager
def shown_progress() -> Iterator[Show]:
    """A function that shows a job; what it showed before is replaced where that is possible."""
    display = _notebook_display()
    yield _in_a_notebook(display) if display is not None else _as_lines()


def _in_a_notebook(display: Callable[..., Any]) -> Show:
    handle: _DisplayHandle | None = None

    def show(job: JobView) -> None:
        nonlocal handle
        line = ProgressLine(job)
        if handle is None:
            handle = cast("_DisplayHandle", display(line, display_id=True))
        else:
            handle.update(line)

    return show


def _as_lines() -> Show:
    """A line for each state, and for each tenth of the steps."""
    said: object = None

    def show(job: JobView) -> None:
        nonlocal said
        tenth = job.progress.step * 10 // job.progress.of if job.progress.of else 0
        here = (job.state, job.reason, tenth)
        if here != said:
            said = here
            sys.stdout.write(progress_text(job) + "\n")
            sys.stdout.flush()

    return show


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display``, where this runs in a notebook's kernel."""
    # Not imported: what is no kernel has not imported it, and it takes half a second.
    if "ipykernel" not in sys.modules:
        return None
    ipython = importlib.import_module("IPython")
    if ipython.get_ipython() is None:
        return None
    return cast("Callable[..., Any]", importlib.import_module("IPython.display").display)
