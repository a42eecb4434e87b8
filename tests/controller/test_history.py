"""A job's history, and the job that it makes."""

import pytest

from services.contract.api.requests import JobPatch
from services.contract.api.views import StopRequest
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.decisions.history import (
    HistoryEntry,
    HistoryError,
    Occurrence,
    creation,
    entry,
    replay,
)
from services.controller.domain.job.events import (
    CancelAsked,
    HoldAsked,
    JobEvent,
    MoveAsked,
    NodeLost,
    PatchAsked,
    ResumeAsked,
)
from tests.controller.histories import (
    NODE,
    NOW,
    finished,
    launched,
    new_job,
    placed,
    progressed,
    saved,
)


def test_a_history_that_travelled_as_json_makes_the_same_job_at_every_length() -> None:
    job = new_job(checkpoint={"keep_last": 7})
    first = saved(job, 10)
    name = first[0].checkpoint_id  # type: ignore[union-attr] # it began so
    events: list[JobEvent] = [
        placed(job),
        launched(job),
        progressed(job),
        *first,
        PatchAsked(JobPatch(priority=3, labels={"a": None}), frozenset({0, 1})),
        HoldAsked(name, "job_" + "0" * 26),
        MoveAsked("preempted", "job_" + "1" * 26, "makes room", 5.0),
        finished(job, step=12, drained=True),
        placed(job),
        NodeLost(NODE, "gone", last_step=20, seen_ms=NOW + 3),
        CancelAsked(StopRequest()),
        ResumeAsked(name),
    ]
    told = [creation(job).model_dump_json()]
    for number, event in enumerate(events):
        now_ms = NOW + 1_000 * number
        job = decide(job, event, now_ms).job
        told.append(entry(Occurrence(event, now_ms)).model_dump_json())
        assert replay(map(HistoryEntry.model_validate_json, told)) == job
    assert (job.fence, job.revision, job.state) == (2, 1, "QUEUED")


def test_what_is_no_history_is_refused() -> None:
    job = new_job(checkpoint={"keep_last": 7})
    for entries in (
        [],
        [entry(Occurrence(ResumeAsked(), NOW))],
        [creation(job), HistoryEntry(kind="Miracle", now_ms=NOW, body={})],
    ):
        with pytest.raises(HistoryError):
            replay(entries)
