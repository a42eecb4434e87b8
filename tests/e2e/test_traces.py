"""``meshloom profile`` through the whole of Meshloom: real ranks record real steps."""

import gzip
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from services.contract.api.views import StopRequest
from services.contract.jobs.traces import TraceRequest, TraceView, drafts
from services.contract.words.states import JobState, TraceState
from tests.e2e.conftest import LONG, Stack
from tests.e2e.typed import typed
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

# Its fifty steps, the most that are recorded, take so long that somebody can come between.
FOREVER: dict[str, Any] = {
    **LONG,
    "model": {
        "factory": "paced_models:PacedDecoder",
        "args": {"pace_s": 0.1, "dim": 32, "layers": 2, "heads": 2},
    },
    "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7},
}


def in_state(stack: Stack, trace: TraceView, *states: TraceState) -> TraceView:
    def look() -> TraceView | None:
        now = stack.client.trace(trace.job_id, trace.id)
        return now if now.state in states else None

    return until(look)


def recording(stack: Stack, job_id: str, **wanted: object) -> TraceView:
    trace = stack.client.record_trace(job_id, TraceRequest.model_validate(wanted))
    return in_state(stack, trace, TraceState.RECORDING)


def test_recorded_steps_lie_where_the_command_says_and_go_with_the_job(stack: Stack) -> None:
    job = stack.submit(**FOREVER).id
    stack.at_step(job, 2)

    done = typed(stack.url, "profile", job, "--steps", 3, "--ranks", "1,0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "open it at https://ui.perfetto.dev" in done.stdout
    (trace,) = stack.client.traces(job).items
    assert (trace.state, trace.ranks, trace.attempt) == (TraceState.DONE, (0, 1), 1)
    assert f"{trace.id} is RECORDING: step" in done.stderr or "is DONE" in done.stderr
    folder = stack.home / "checkpoints" / trace.folder
    for file in trace.files:
        path = Path(file.path)
        assert path == folder / f"rank-{file.rank:05d}.trace.json.gz"
        assert str(path) in done.stdout
        assert_shows_steps(path, list(range(file.first_step, file.first_step + 3)))
    assert [file.rank for file in trace.files] == [0, 1]

    unknown = typed(stack.url, "profile", job, "--ranks", "0,7")
    assert (unknown.returncode, "/ranks/1" in unknown.stderr) == (2, True), unknown.stderr
    for ranks in ("0,x", "9" * 5_000):
        no_number = typed(stack.url, "profile", job, "--ranks", ranks)
        assert (no_number.returncode, "--ranks is numbers" in no_number.stderr) == (2, True)

    stack.client.kill(job)
    assert stack.rested(job).state is JobState.CANCELLED
    refused = typed(stack.url, "profile", job)
    assert refused.returncode == 2
    assert "CANCELLED: only steps of a running job are recorded; resume it first" in refused.stderr
    stack.client.delete(job, purge_checkpoints=True)
    until(lambda: not folder.parent.exists())


def test_a_trace_outlives_the_controller_and_fails_with_its_ranks(stack: Stack) -> None:
    job = stack.submit(**FOREVER).id
    stack.at_step(job, 2)

    # The controller is killed while a trace is recorded: agents keep what they have to tell.
    asked = typed(stack.url, "profile", job, "--steps", 50, "--no-wait")
    assert (asked.returncode, asked.stdout.strip()) == (0, stack.client.traces(job).items[0].id)
    half = in_state(stack, stack.client.traces(job).items[0], TraceState.RECORDING)
    stack.part("services.controller").kill()
    whole = in_state(stack, half, TraceState.DONE, TraceState.FAILED)
    assert whole.state is TraceState.DONE, (whole.reason, stack.client.events(job).items[-8:])

    # A rank is killed while a trace is recorded.
    lost = recording(stack, job, steps=50, ranks="all")
    pid = stack.client.ranks(job).items[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    failed = in_state(stack, lost, TraceState.FAILED)
    # Of the ranks, the one is told of first that was killed, or that lost its peer.
    assert re.search(
        r"its process ended by signal 9 before it was done|the rank failed \(\w+\) ",
        str(failed.reason),
    )
    assert not failed.files
    until(lambda: drafts(stack.home / "checkpoints", job) == [])
    until(lambda: stack.job(job).attempt == 2 and stack.job(job).state is JobState.RUNNING)

    # A person ends the job while a trace is recorded.
    last = recording(stack, job, steps=50)
    stack.client.cancel(job, StopRequest(checkpoint="none"))
    over = in_state(stack, last, TraceState.FAILED)
    assert "the rank ended after" in str(over.reason)
    assert stack.rested(job).state is JobState.CANCELLED
    kinds = [e.kind for e in stack.client.events(job).items if e.kind.startswith("trace.")]
    ends = ["done", "failed", "failed"]
    assert kinds == [f"trace.{what}" for end in ends for what in ("asked", "recording", end)]


def assert_shows_steps(path: Path, steps: list[int]) -> None:
    """Perfetto reads Chrome's format: complete events (``X``) with a name, a beginning and a time."""
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = [e for e in found if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    assert all(e["dur"] >= 0 for e in marks)
    in_order = sorted(marks, key=lambda e: e["ts"])
    named = [e["name"] for e in in_order if e["name"].startswith("ProfilerStep#")]
    assert named == [f"ProfilerStep#{step}" for step in steps]
    phases = {e["name"].split(" ")[0] for e in marks if e["name"].startswith("FSDP::")}
    assert {"FSDP::all_gather", "FSDP::post_backward_reduce"} <= phases


def test_a_script_that_never_reports_fails_its_trace_when_it_ends(
    stack: Stack, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job = stack.client.submit(
        {
            "name": "silent",
            "entrypoint": {"module": "waiting_script", "args": [str(fifo)]},
            "resources": {"ranks": 1, "device": "cpu"},
        }
    ).id
    until(lambda: stack.job(job).state is JobState.RUNNING)
    trace = recording(stack, job)
    fifo.write_text("go on")
    assert stack.rested(job).state is JobState.SUCCEEDED
    failed = in_state(stack, trace, TraceState.FAILED)
    assert "a step of a script begins with a session.report" in str(failed.reason)
