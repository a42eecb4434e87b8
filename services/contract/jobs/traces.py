"""Traces: what ranks record of their steps, where their files lie, and how many there may be.

One folder a trace, with a file a rank, which that rank writes beside and then renames::

    <root>/<job id>/traces/<trace id>/rank-00000.trace.json.gz

Each is a gzip of Chrome's trace format as PyTorch's profiler writes it, which Perfetto opens.
"""

import contextlib
import itertools
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.contract.system.durable import names_like
from services.contract.words.bounds import MOST_RANKS
from services.contract.words.ids import JobId, NodeId, TraceId
from services.contract.words.states import TraceState

MOST_STEPS: Final = 50
MOST_TRACED_RANKS: Final = 64
"""So many ranks are recorded by one trace."""
TRACES_KEPT: Final = 8
"""So many traces are kept of a job: the files of an older one are removed when another is asked for."""
MOST_BYTES: Final = 512 << 20
"""A rank's trace that is larger, before it is compressed, is not kept."""
_DRAFT: Final = ".partial"
_MOST_DRAFTS: Final = 10_000

TracedRanks = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...],
    Field(min_length=1, max_length=MOST_TRACED_RANKS),
]


def traces_folder(root: Path, job_id: str) -> Path:
    """Where all traces of a job lie."""
    return root / job_id / "traces"


def trace_file(root: Path, job_id: str, trace_id: str, rank: int) -> Path:
    """Where a rank's file of a trace lies."""
    return traces_folder(root, job_id) / trace_id / f"rank-{rank:05d}.trace.json.gz"


def raw_draft(file: Path) -> Path:
    """Where a rank's trace lies before it is compressed."""
    return file.with_name(f".{file.name.removesuffix('.gz')}{_DRAFT}")


def draft(file: Path) -> Path:
    """Where a rank's trace lies while it is compressed."""
    return file.with_name(f".{file.name}{_DRAFT}")


def remove_drafts(file: Path) -> None:
    """Remove what was not finished of a rank's file, and its folder if nothing else is in it. Blocking.

    Raises:
        OSError: The storage refuses.
    """
    # The folder may be a rank's link that leads elsewhere.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(file.parent, flags)
    except FileNotFoundError:
        return
    try:
        for unfinished in (raw_draft(file), draft(file)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished.name, dir_fd=folder)
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):  # files are in it
        file.parent.rmdir()


def drafts(root: Path, job_id: str) -> list[Path]:
    """What ranks of a job have not finished: they are writing, or died while they did. Some of it where there is much."""
    folder = traces_folder(root, job_id)
    traces = (folder / name for name in names_like(folder, "trace_*"))
    found = (
        trace / name
        for trace in traces
        if not trace.is_symlink()
        for name in names_like(trace, f".rank-*{_DRAFT}")
    )
    return sorted(itertools.islice(found, _MOST_DRAFTS))


class TraceRequest(BaseModel):
    """Record the next ``steps`` whole steps of these ranks, or of all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    ranks: TracedRanks | Literal["all"] = (0,)


class TraceFileView(BaseModel):
    """One rank's file. ``path`` is on the node, or an address in the bucket; ``bytes`` compressed; the steps are the first and last."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    rank: int
    node_id: NodeId
    path: str
    bytes: int
    first_step: int
    last_step: int


class TraceView(BaseModel):
    """A recording of some steps of ranks.

    ``folder`` is below the storage root. A trace that FAILED may have the files of some ranks; then
    ``reason`` says which of the others failed first, and why.
    """

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    id: TraceId
    job_id: JobId
    state: TraceState
    attempt: int
    steps: int
    ranks: tuple[int, ...]
    folder: str
    files: tuple[TraceFileView, ...] = ()
    bytes: int = 0
    reason: str | None = None
    created_at: datetime
    ended_at: datetime | None = None


class TraceList(BaseModel):
    """A job's newest traces, newest first."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    items: tuple[TraceView, ...]
