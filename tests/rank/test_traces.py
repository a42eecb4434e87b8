"""Ranks record their steps when they are asked to, and nothing else changes."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_core import torch_private
from services.contract.jobs import traces
from services.contract.jobs.specs import JobSpec
from services.contract.jobs.traces import drafts, trace_file, traces_folder
from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import (
    RankFinished,
    RankMessage,
    RankOrder,
    RankSeat,
    RankTraced,
    RankTraceFailed,
    TraceOrder,
)
from services.contract.words.ids import new_trace_id
from services.worker.rank.loop import trace as recording
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.trace import TraceRecorder
from tests.rank.gang import JOB, Attempt, Ranks, Trained
from tests.rank.test_checkpoints import seat_of
from tests.rank.test_scripts import EXAMPLES, job
from tests.rank.test_trainable import UNITS, of
from tests.waiting import until

Spec = Callable[..., JobSpec]
TRACE, OTHER = (new_trace_id(1_700_000_000_000, bytes([n] * 10)) for n in (1, 2))
CPU = torch.device("cpu")


def order(steps: int = 3, trace_id: str = TRACE) -> TraceOrder:
    return TraceOrder(trace_id=trace_id, steps=steps)


def events(root: Path, rank: int = 0, trace_id: str = TRACE) -> list[dict[str, Any]]:
    """What a rank's file holds; nothing else lies beside it."""
    path = trace_file(root, JOB, trace_id, rank)
    assert drafts(root, JOB) == []
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_of_millions_of_unfinished_files_that_ranks_made_some_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_MOST_DRAFTS", 3)
    folder = traces_folder(tmp_path, JOB) / TRACE
    folder.mkdir(parents=True)
    kept = {folder / f".rank-{number}.partial" for number in range(5)}
    for path in kept:
        path.touch()
    (folder / "rank-00000.trace.json.gz").touch()
    found = drafts(tmp_path, JOB)
    assert len(found) == len({*found} & kept) == 3


def names(found: list[dict[str, Any]]) -> set[str]:
    return {str(event.get("name")) for event in found}


def spans(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Those on the CPU, for each has a twin where its device's work is."""
    return [e for e in found if e.get("name") == name and e.get("cat") == "user_annotation"]


def steps_of(found: list[dict[str, Any]]) -> list[str]:
    marks = [e for e in found if str(e.get("name")).startswith("ProfilerStep#")]
    marks = [e for e in marks if e.get("cat") == "user_annotation"]
    return [str(e["name"]) for e in sorted(marks, key=lambda e: e["ts"])]


def told(attempt: Attempt, rank: int = 0) -> RankTraced:
    (message,) = attempt.of_kind(rank, RankTraced)
    assert attempt.of_kind(rank, RankTraceFailed) == []
    return message


@pytest.mark.ranks
def test_recorded_steps_have_their_numbers_and_phases_and_the_losses_of_a_run_without(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    attempt = ranks.start(spec())
    attempt.order(0, trace=order())
    attempt.order(1, trace=order(steps=2))
    attempt.succeeded()
    assert attempt.losses() == trained.of(spec()).losses()
    for rank, count in ((0, 3), (1, 2)):
        message = told(attempt, rank)
        size = trace_file(ranks.root, JOB, TRACE, rank).stat().st_size
        assert (message.first_step, message.bytes) == (message.last_step - count + 1, size)
        found = events(ranks.root, rank)
        assert steps_of(found) == [
            f"ProfilerStep#{step}" for step in range(message.first_step, message.last_step + 1)
        ]
        # Gathered for the forward pass and again for the backward one; reduced once.
        phases = {"all_gather": 2 * count, "post_backward_reduce": count}
        seen = {phase: len(spans(found, f"FSDP::{phase} (blocks.1)")) for phase in phases}
        assert seen == phases
        assert "aten::mm" in names(found)


@pytest.mark.ranks
def test_the_steps_of_a_trainable_are_recorded_with_the_phases_of_its_models(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    gan = of(spec, "Gan")
    attempt = ranks.start(gan, units=UNITS)
    attempt.order(0, trace=order(steps=2))
    attempt.succeeded()
    assert attempt.losses() == trained.of(gan, units=UNITS).losses()
    found = events(ranks.root)
    assert len(steps_of(found)) == 2
    assert {"FSDP::all_gather (0)", "FSDP::all_gather (2)"} <= names(found)


@pytest.mark.ranks
def test_the_steps_of_a_script_are_those_between_its_reports(ranks: Ranks) -> None:
    attempt = ranks.start(job(), code=EXAMPLES)
    attempt.order(0, trace=order(steps=2))
    attempt.succeeded()
    message = told(attempt)
    found = events(ranks.root)
    assert steps_of(found) == [f"ProfilerStep#{n}" for n in (message.first_step, message.last_step)]
    assert message.last_step == message.first_step + 1
    assert any(name.startswith("FSDP::") for name in names(found)), "torch's own phases"
    assert len(attempt.losses()) == 8


@pytest.mark.ranks
def test_a_script_that_records_has_the_losses_of_one_that_does_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone = ranks.start(job(), code=EXAMPLES).succeeded().losses()
    attempt = ranks.start(job(), fence=2, code=EXAMPLES)
    for rank in (0, 1):
        attempt.order(rank, trace=order(steps=4))
    assert attempt.succeeded().losses() == alone
    assert [len(steps_of(events(tmp_path, rank))) for rank in (0, 1)] == [4, 4]


@pytest.mark.ranks
@pytest.mark.parametrize("reports", [True, False])
def test_a_run_that_ends_before_all_steps_says_so_and_leaves_no_file(
    ranks: Ranks, spec: Spec, *, reports: bool
) -> None:
    if reports:
        attempt = ranks.start(spec())
        why = "the rank ended after 5 of 50 steps"
    else:
        attempt = ranks.start(job("script/train.py", "--steps", "3", "--dim", "16"), code=EXAMPLES)
        why = "the rank ended before its next step; a step of a script begins with a session.report"
    attempt.order(0, trace=order(steps=50))
    attempt.succeeded()
    assert [message.reason for message in attempt.of_kind(0, RankTraceFailed)] == [why]
    assert len(attempt.of_kind(0, RankFinished)) == 1
    assert not traces_folder(ranks.root, JOB).exists()


# --- one recorder, without the ranks around it ------------------------------------------------


class Recorded:
    """A recorder in this process, and what it told."""

    def __init__(self, root: Path, spec: JobSpec) -> None:
        self.root = root
        self.seat: RankSeat = seat_of(root, spec)
        self.messages: list[RankMessage] = []
        board = BoardWriter.create(root / "board", 1)
        watch = BoardWatch(board, (), CPU)
        self.recorder = TraceRecorder(self.seat, self.messages.append, watch, CPU)
        self.step = 0

    def ask(self, steps: int = 1, trace_id: str = TRACE) -> None:
        """As an agent does; what it asks for begins."""
        self.recorder.take_orders([RankOrder(trace=order(steps, trace_id))])
        self.recorder.turn(self.step)

    def make(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.recorder.begin_step(self.step)
            torch.ones(4).mul(2).sum()
            self.recorder.end_step()
            self.recorder.turn(self.step)

    def reason(self) -> str:
        """Of the one failure that was told."""
        (failed,) = until(lambda: self.messages)
        assert isinstance(failed, RankTraceFailed), failed
        assert drafts(self.root, JOB) == []
        return failed.reason

    def done(self) -> RankTraced:
        (message,) = until(lambda: self.messages)
        assert isinstance(message, RankTraced), message
        return message


@pytest.fixture
def recorded(tmp_path: Path, spec: Spec) -> Iterator[Recorded]:
    made = Recorded(tmp_path, spec())
    with made.recorder:
        yield made
    assert not torch_private.is_profiling(), "what is not recorded any more costs nothing"


def test_what_is_larger_than_may_be_is_not_kept_and_the_next_one_may_be_smaller(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_BYTES", 2_000)
    recorded.ask(steps=3)
    recorded.make(3)
    assert recorded.reason() == "3 steps make 0 MiB, and a trace has 0 at most: ask for fewer steps"
    assert list(traces_folder(recorded.root, JOB).iterdir()) == []
    monkeypatch.undo()
    recorded.messages.clear()
    recorded.ask(trace_id=OTHER)
    recorded.make(2)
    assert (recorded.done().first_step, recorded.done().last_step) == (4, 4)


def test_a_storage_that_refuses_fails_the_trace_alone(recorded: Recorded) -> None:
    traces_folder(recorded.root, JOB).parent.mkdir()
    traces_folder(recorded.root, JOB).write_text("no folder")
    recorded.ask()
    recorded.make()
    assert "NotADirectoryError" in recorded.reason() or "FileExistsError" in recorded.reason()


def test_a_trace_that_the_disk_did_not_take_whole_is_none(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(_: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [')

    monkeypatch.setattr(profile, "export_chrome_trace", cut)
    recorded.ask()
    recorded.make()
    assert "could not be written completely: its disk may be full" in recorded.reason()


def test_code_that_records_by_a_profiler_of_its_own_goes_on_with_it(recorded: Recorded) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as own:
        recorded.ask()
        recorded.make()
    assert recorded.reason() == "the training code is recording with a profiler of its own"
    assert "aten::mul" in {event.key for event in own.key_averages()}


def test_a_second_trace_is_refused_while_the_first_one_is_recorded(recorded: Recorded) -> None:
    recorded.ask(steps=2)
    recorded.make()
    recorded.ask(trace_id=OTHER)
    assert [m.trace_id for m in recorded.messages if isinstance(m, RankTraceFailed)] == [OTHER]
    recorded.messages.clear()
    recorded.make()
    assert recorded.done().trace_id == TRACE


def test_what_is_between_two_steps_is_recorded_but_for_a_pause(recorded: Recorded) -> None:
    recorded.ask(steps=2)
    recorded.make()
    torch.ones(4).exp()
    with recorded.recorder.paused():
        torch.ones(4).cos()
    recorded.make()
    recorded.done()
    found = names(events(recorded.root))
    assert {"aten::mul", "aten::exp"} <= found
    assert "aten::cos" not in found


def test_another_thread_that_reports_steps_does_not_touch_the_recording(recorded: Recorded) -> None:
    recorded.ask(steps=2)
    recorded.make()
    other = threading.Thread(target=recorded.make)
    other.start()
    other.join()
    assert recorded.messages == []
    recorded.make()
    assert steps_of_file(recorded) == ["ProfilerStep#1", "ProfilerStep#3"]


def steps_of_file(recorded: Recorded) -> list[str]:
    recorded.done()
    return steps_of(events(recorded.root))


def test_a_recording_that_fails_in_the_midst_ends_and_the_next_one_succeeds(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object, step: int) -> None:
        raise RuntimeError(f"no annotation of step {step}")

    recorded.ask(steps=2)
    recorded.make()
    with monkeypatch.context() as patch:
        patch.setattr(recording._Recording, "begin_step", broken)
        recorded.make()
    assert recorded.reason() == "RuntimeError: no annotation of step 2"
    assert not torch_private.is_profiling()
    recorded.messages.clear()
    recorded.ask(trace_id=OTHER)
    recorded.make()
    assert recorded.done().first_step == 3
