"""What a hostile rank says of metrics is bounded before anything is kept of it."""

from collections.abc import Mapping
from pathlib import Path

from services.contract.messages.board import BoardReader
from services.contract.messages.rank_pipe import RANK_MESSAGE, MetricPoint, RankMetrics, RankSeat
from services.contract.messages.telemetry import MetricRecord
from services.contract.words.bounds import METRIC_NAME_CHARACTERS, METRIC_NAMES_KEPT, MOST_WHOLE
from services.worker.agent.host.folders import AttemptFolder
from services.worker.agent.ranks.launch import Crew
from services.worker.agent.telemetry.gang_telemetry import METRICS_PER_BEAT, GangTelemetry
from tests.agent.conftest import NODE, launch


def watched(folder: Path, boards: Mapping[int, BoardReader] | None = None) -> GangTelemetry:
    command = launch(ranks=2)
    seats = {
        rank: RankSeat(
            job_id=command.job_id,
            fence=command.fence,
            rank=rank,
            local_rank=rank,
            device="cpu",
            spec=command.spec,
            plan=command.plan,
            storage_root="/nowhere",
            board_path="/nowhere/board",
            log_folder=str(folder),
            store_host="127.0.0.1",
            store_port=1,
            threads=1,
        )
        for rank in range(2)
    }
    crew = Crew(seats=seats, store=None, pids={0: 1, 1: 1}, pipes={}, boards=boards or {})
    return GangTelemetry(crew, NODE, AttemptFolder(folder, folder / "boards"))


def said(values: str, step: int = 1) -> RankMetrics:
    line = f'{{"kind":"rank_metrics","points":[{{"step":{step},"values":{{{values}}}}}]}}'
    message = RANK_MESSAGE.validate_json(line)
    assert isinstance(message, RankMetrics)
    return message


def told(telemetry: GangTelemetry) -> tuple[MetricRecord, ...]:
    return telemetry.take(last=True).metrics


def test_thousands_of_names_leave_64_of_an_attempt_and_a_count(tmp_path: Path) -> None:
    telemetry = watched(tmp_path)
    telemetry.take_metrics(0, said('"kept":1'))
    for at in range(0, 3000, 50):
        telemetry.take_metrics(0, said(",".join(f'"name-{at + n}":{n}' for n in range(50)), at))
    telemetry.take_metrics(0, said('"kept":2', 9_999))
    records = told(telemetry)
    names = {name for record in records for name in record.values}
    assert len(names) == METRIC_NAMES_KEPT
    assert records[-1].values == {"kept": 2.0}
    assert records[-1].left_out == 1024 - METRIC_NAMES_KEPT
    # What the controller reads of them is what was written, whatever they are.
    assert [MetricRecord.model_validate_json(r.model_dump_json()) for r in records] == list(records)


def test_the_largest_count_of_names_that_a_rank_may_tell_fails_no_agent(tmp_path: Path) -> None:
    telemetry = watched(tmp_path)
    names = {f"name-{n}": 1.0 for n in range(METRIC_NAMES_KEPT)}
    for values in (names, {"one more": 1.0}):
        point = MetricPoint(step=1, values=values)
        telemetry.take_metrics(0, RankMetrics(points=(point,), left_out=MOST_WHOLE))
    assert [record.left_out for record in told(telemetry)] == [MOST_WHOLE, MOST_WHOLE]


def test_what_is_no_number_is_a_gap_and_names_are_short_and_printable(tmp_path: Path) -> None:
    telemetry = watched(tmp_path)
    telemetry.take_metrics(
        0,
        said(
            f'"nan":NaN,"far":1e999,"long int":{"9" * 400},"text":"x","list":[1],"yes":true,'
            f'"":1,"a,b":2,"\\u001b[31m\\n":3,"{"x" * 5_000}":4,"fine":-2.5e-7'
        ),
    )
    telemetry.take_metrics(1, said('"of rank 1":1'))
    (record,) = told(telemetry)
    short = [name for name in record.values if name.startswith("xxx")]
    assert len(short) == 1
    assert len(short[0]) == METRIC_NAME_CHARACTERS
    assert {n: v for n, v in record.values.items() if n not in short} == {
        "nan": None,
        "far": None,
        "long int": None,
        "text": None,
        "list": None,
        "yes": 1.0,
        "_": 1.0,
        "a_b": 2.0,
        "_[31m_": 3.0,
        "fine": -2.5e-7,
    }


def test_a_flood_of_points_goes_out_in_parts_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    telemetry = watched(tmp_path)
    for step in range(1, 10_101):
        telemetry.take_metrics(0, said('"x":1', step))
    first = told(telemetry)
    assert (len(first), first[0].step) == (METRICS_PER_BEAT, 101)
    assert not telemetry.drained()
    steps = [record.step for _ in range(30) for record in told(telemetry)]
    assert steps == list(range(601, 10_101))
    assert telemetry.drained()
