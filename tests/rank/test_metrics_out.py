"""What a run measures leaves it: files beside the logs, and messages to the agent."""

import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]  # it has no types
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]  # it has no types

from meshloom.trainable import Trainable
from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RANK_MESSAGE,
    RankMessage,
    RankMetrics,
    RankReady,
)
from services.contract.words.bounds import METRIC_NAMES_KEPT
from services.worker.rank.loop.run import Run
from services.worker.rank.metrics.agent_outlet import AgentOutlet
from services.worker.rank.metrics.bounded_file import BoundedFile
from services.worker.rank.metrics.json_lines import JsonLines
from services.worker.rank.metrics.points import Point
from services.worker.rank.metrics.reporter import MetricsReporter
from tests.disk import small_disk
from tests.rank.gang import Trained
from tests.rank.test_any_batch import EQUAL, of
from tests.rank.test_checkpoints import seat_of
from tests.rank.user_trainables import Alone, Gan
from tests.waiting import until

Spec = Callable[..., JobSpec]
WITH_METRICS = EQUAL[4]


def test_a_metric_that_is_called_as_a_field_of_a_line_takes_no_fields_place(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", 3)
    lines.write([Point(7, {"step": 70.0, "time": 0.5, "attempt": 9.0, "hits": 1.0}, 2.0)])
    lines.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 7,
        "attempt": 3,
        "time": 2.0,
        "user/step": 70.0,
        "user/time": 0.5,
        "user/attempt": 9.0,
        "hits": 1.0,
    }


@pytest.mark.ranks
def test_rank_0_writes_each_step_and_pass_once_and_sends_what_the_loss_gave(
    trained: Trained, spec: Spec
) -> None:
    run = trained.of(of(spec, *WITH_METRICS))
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    (passed,) = [line for line in lines if "validation/loss" in line]
    assert {line["step"]: line["loss"] for line in steps} == run.losses()
    assert len(steps) == len(run.losses())
    assert steps[0].keys() >= {"hits", "largest", "samples_per_s", "learning_rate", "attempt"}
    assert passed.keys() >= {"validation/hits", "validation/largest"}
    sent = [point for message in run.of_kind(0, RankMetrics) for point in message.points]
    assert [point.step for point in sent] == [1, 2, 3, 4, 5, 6, 6]
    assert sent[0].values == {"hits": steps[0]["hits"], "largest": steps[0]["largest"]}
    assert sent[-1].values.keys() == {"validation/hits", "validation/largest"}
    assert run.of_kind(1, RankMetrics) == []
    (events,) = (run.root / "tensorboard").iterdir()
    assert events.name == "events.out.tfevents.0000000001.attempt-1"
    drawn = scalars(events)
    assert [step for step, tag, _ in drawn if tag == "loss"] == [1, 2, 3, 4, 5, 6]
    assert (6, "validation/hits", passed["validation/hits"]) in drawn
    (ready,) = run.of_kind(0, RankReady)
    assert (ready.throughput_unit, ready.loss_unit) == ("samples", "")


def scalars(path: Path) -> list[tuple[int, str, object]]:
    """Step, tag and value of all scalars of an event file, whose checksums are right."""
    content = path.read_bytes()
    found: list[tuple[int, str, object]] = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data, end = content[12 : 12 + length], 16 + length
        for part, at in ((content[:8], 8), (data, 12 + length)):
            assert struct.unpack("<I", content[at : at + 4]) == (masked_crc32c(part),)
        event = Event.FromString(data)
        found += [(event.step, v.tag, pytest.approx(v.simple_value)) for v in event.summary.value]
        content = content[end:]
    return found


def test_an_outlet_that_fails_is_told_of_once_and_ends_alone(
    tmp_path: Path, spec: Spec, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # nothing can be appended there
    refused, taken = Refusing(), Taking()
    seat = seat_of(tmp_path, spec()).model_copy(update={"log_folder": str(tmp_path)})
    sent: list[RankMessage] = []
    with MetricsReporter(seat, sent.append, [refused, taken]) as reporter:
        reporter.report(1, {"x": 1.0})
        until(lambda: taken.points)
        reporter.report(2, {"x": torch.tensor(2.0), "y": math.nan})  # type: ignore[dict-item] # users do
        with pytest.raises(TypeError, match="metric 'z': str is no number"):
            reporter.report(3, {"z": "high"})  # type: ignore[dict-item] # as above
    assert [(point.step, dict(point.values)["x"]) for point in taken.points] == [(1, 1.0), (2, 2.0)]
    assert refused.tries == 1
    assert sent == []  # an agent that does not say that it hears metrics is told none
    said = capfd.readouterr().err
    assert said.count("metrics are no longer written to a broken service: OSError: gone") == 1
    assert said.count(f"metrics are not written to {tmp_path / 'metrics.jsonl'}") == 1


class Taking:
    name = "a list"

    def __init__(self) -> None:
        self.points: list[Point] = []

    def write(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        pass


class Refusing(Taking):
    name = "a broken service"
    tries = 0

    def write(self, points: Sequence[Point]) -> None:  # noqa: ARG002 an outlet's
        self.tries += 1
        raise OSError("gone")


def test_a_name_that_is_no_unicode_costs_no_file(
    tmp_path: Path, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    seat = seat_of(tmp_path, spec()).model_copy(update={"log_folder": str(tmp_path)})
    with MetricsReporter(seat, lambda _: None) as metrics:
        metrics.report(1, {"a\udc80b": 2.0})
        metrics.report(2, {"plain": 3.0})
    assert capsys.readouterr().err == ""
    (events,) = (Path(seat.log_folder) / "tensorboard").iterdir()
    assert [(step, tag) for step, tag, _ in scalars(events)] == [(1, "a\\udc80b"), (2, "plain")]


def test_a_loop_of_thousands_of_steps_a_second_sends_few_messages() -> None:
    sent: list[RankMetrics] = []
    outlet = AgentOutlet(lambda message: sent.append(cast("RankMetrics", message)), steps=60_000)
    outlet.write([Point(step, {"hits": step, "loss": 1.0}, 0.0) for step in range(1, 5_001)])
    outlet.write([Point(5_001, {"loss": 1.0}, 0.0)])
    steps = [point.step for message in sent for point in message.points]
    assert (len(sent), len(steps), steps[-1]) == (4, 256, 4_998)
    assert all(step % 3 == 0 for step in steps)
    assert all(len(message.model_dump_json()) < 4_096 for message in sent)


def test_of_a_second_with_many_names_an_agent_is_sent_less_than_it_reads() -> None:
    sent: list[RankMetrics] = []
    outlet = AgentOutlet(lambda message: sent.append(cast("RankMetrics", message)), steps=100)
    values = {f"{number:04d}-{'x' * 80}": 1 / 3 for number in range(200)}
    outlet.write([Point(step, values, 0.0) for step in range(1, 101)])
    assert {message.left_out for message in sent} == {200 - METRIC_NAMES_KEPT}
    assert {len(point.values) for message in sent for point in message.points} == {64}
    lines = [message.model_dump_json() for message in sent]
    assert sum(map(len, lines)) < 1 << 19
    assert [RANK_MESSAGE.validate_json(line) for line in lines] == sent


def test_a_file_of_metrics_is_bounded_and_has_whole_records_only(tmp_path: Path) -> None:
    file = BoundedFile(tmp_path / "of" / "metrics", most=10_000)
    steps: list[int] = []
    for start in range(1, 4_001, 100):
        for point in file.share([Point(n, {"x": 1.0}, 0.0) for n in range(start, start + 100)]):
            steps.append(point.step)
            file.add(b"%07d\n" % point.step)
        file.flush()
    file.close()
    lines = [int(line) for line in file.path.read_text().splitlines()]
    assert lines == steps[: len(lines)]
    assert 9_000 < file.path.stat().st_size <= 10_000
    assert lines[:600] == list(range(1, 601))
    assert lines[-1] > 3_000


def test_a_full_disk_costs_records_and_no_training(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mebibytes=1) as disk:
        file = BoundedFile(disk.path / "metrics")
        file.add(b"first\n")
        file.flush()
        disk.fill()
        file.add(b"x" * 100_000 + b"\n")
        file.flush()
        assert file.path.read_text() == "first\n"
        disk.free()
        file.add(b"last\n")
        file.close()
        assert file.path.read_text() == "first\nlast\n"


@pytest.mark.parametrize(
    ("trainable", "loss", "counts_tokens", "unit"),
    [
        (Alone, None, True, "nats"),
        (Alone, None, False, ""),
        (Alone, "next_token", True, "nats"),
        (Alone, "mse", True, ""),
        (Gan, None, True, ""),
    ],
)
def test_a_loss_is_in_nats_where_it_is_that_of_the_next_token(
    spec: Spec, trainable: type[Trainable], loss: str | None, unit: str, *, counts_tokens: bool
) -> None:
    chosen = None if loss is None else Factory(factory=loss)
    run = SimpleNamespace(
        trainable=trainable(),
        spec=spec().model_copy(update={"loss": chosen}),
        counts_tokens=counts_tokens,
    )
    assert Run.loss_unit.fget(run) == unit  # type: ignore[attr-defined]  # it is a property
