"""Whatever an agent's user writes into Redis is short once it is read, and soon refused if it is wrong."""

import dataclasses
import itertools
import json
import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from services.contract.jobs.plans import GangPlan
from services.contract.messages.facts import (
    FACT,
    CheckpointCorrupt,
    Evaluated,
    Fact,
    GangDiagnosed,
    GangEnded,
    Inventory,
    LaunchRefused,
    NodeJoined,
    RankExit,
)
from services.contract.messages.probing import ModelProbed
from services.contract.messages.rank_pipe import RankMetrics, RankReady
from services.contract.messages.telemetry import (
    LogLine,
    MetricRecord,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.contract.storage.exports import ExportManifest
from services.contract.storage.job_cards import JobCard
from services.contract.storage.manifests import Manifest
from services.contract.system.mask import Mask
from services.contract.words import bounds
from services.contract.words.bounds import (
    MOST_RANKS,
    MOST_RANKS_OF_A_NODE,
    NAME_CHARACTERS,
    TRACEBACK_CHARACTERS,
    Moment,
    Positive,
    Whole,
)
from services.contract.words.ids import new_job_id
from tests.controller.profiles import FACTS

LONG = "x" * 1_000_000
JOB = new_job_id(1, bytes(10))
CHECKPOINT = f"ckpt_{JOB[4:]}-s000000001-a0001"
OF_GANG = {"job_id": JOB, "fence": 1, "node_id": "loom-1"}
EXIT = {"rank": 0, "pid": 1, "order": 0, "step": 1, "phase": LONG, "error": LONG}
FINDING = {"rank": 0, "pid": 1, "phase": LONG, "unit": LONG, "stacks": LONG, "frames": [LONG] * 9}
SHORT_FINDING = {"rank": 0, "pid": 1, "phase": "F"}
FOUND = {"why": "asked", "still_s": 1, "allowed_s": 1}
SAMPLE = {"rank": 0, "local_rank": 0, "fence": 1, "node_id": "loom-1", "pid": 1, "step": 1}
INVENTORY = {"hostname": LONG, "cpu_slots": 1, "cpu_count": 1, "memory_bytes": 1}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (LaunchRefused, OF_GANG | {"reason": LONG, "condition": LONG}),
        (CheckpointCorrupt, OF_GANG | {"checkpoint_id": CHECKPOINT, "file": LONG, "reason": LONG}),
        (
            Evaluated,
            OF_GANG
            | {"step": 1, "loss": 1.0, "tokens": 1}
            | {"baselines": {f"{LONG}{number}": 1.0 for number in range(20)}},
        ),
        (
            GangEnded,
            OF_GANG
            | {"last_step": 1}
            | {"exits": [EXIT | {"traceback": LONG, "error_types": [LONG, *["x"] * 1_000]}]},
        ),
        (
            GangDiagnosed,
            OF_GANG
            | {"findings": {"why": "asked", "still_s": 0, "allowed_s": 0, "ranks": [FINDING]}},
        ),
        (
            NodeJoined,
            {"node_id": "loom-1", "incarnation": "a"}
            | {"inventory": INVENTORY | {"versions": {LONG: LONG}}},
        ),
        (RankSample, SAMPLE | {"device": LONG, "phase": LONG, "unit": LONG}),
        (RankStacks, {"rank": 0, "fence": 1, "node_id": "loom-1", "text": LONG}),
        (LogLine, {"rank": 0, "fence": 1, "stream": "stdout", "time_ms": 1, "text": LONG}),
    ],
)
def test_what_people_read_is_cut_with_a_mark(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    read = kind.model_validate_json(json.dumps(fields)).model_dump_json()
    assert "characters cut" in read
    assert len(read) < 3 * TRACEBACK_CHARACTERS
    # Cut once, it is not cut again wherever it is read next.
    assert kind.model_validate_json(read).model_dump_json() == read


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "gang_launched", "pids": {f"a{n}": "b" for n in range(MOST_RANKS_OF_A_NODE + 1)}},
        {"kind": "gang_ended", "last_step": 1, "exits": [0] * (MOST_RANKS_OF_A_NODE + 1)},
        {"kind": "gang_ended", "last_step": 1, "exits": [0] * 9},
        {
            "kind": "gang_diagnosed",
            "findings": FOUND | {"ranks": [SHORT_FINDING | {"frames": [0] * 9}] * 9},
        },
        {"kind": "gang_diagnosed", "findings": FOUND | {"ranks": [0] * (MOST_RANKS_OF_A_NODE + 1)}},
        {"kind": "chain_damaged", "records": [0] * (MOST_RANKS + 1)},
        {"kind": "gang_launched", "pids": {}, "job_id": LONG},
        {"kind": "gang_launched", "pids": {}, "store": {"host": LONG, "port": 1}},
        {"kind": "replica_ready", "replica": 0, "life": 1, "store": {"host": LONG, "port": 1}},
    ],
)
def test_what_must_be_exact_is_refused_with_one_fault(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        FACT.validate_json(json.dumps(OF_GANG | fields))
    assert refused.value.error_count() == 1


def test_of_all_ranks_of_a_node_together_a_few_thousand_connections_are_read() -> None:
    end = {"host": "a", "port": 1}
    rank = SHORT_FINDING | {"unanswered": [{"here": end, "there": end, "retries": 1}] * 64}
    told = {"kind": "gang_diagnosed", "findings": FOUND | {"ranks": [rank] * 100}}
    fact = FACT.validate_json(json.dumps(OF_GANG | told))
    assert isinstance(fact, GangDiagnosed)
    assert sum(len(rank.unanswered) for rank in fact.findings.ranks) == 4_096


def test_how_a_node_was_measured_is_said_in_few_words() -> None:
    told = {"kind": "node_measured", "node_id": "a", "incarnation": "b", "device_type": "cpu"}
    details: list[dict[str, Any]] = [{"a": [[]]}, {str(n): n for n in range(65)}]
    for detail in details:
        with pytest.raises(ValidationError):
            FACT.validate_json(json.dumps(told | {"detail": detail}))


def test_names_of_lives_and_groups_are_no_longer_than_names() -> None:
    joined = {"kind": "node_joined", "node_id": "loom-1", "inventory": INVENTORY}
    FACT.validate_json(json.dumps(joined | {"incarnation": "a" * NAME_CHARACTERS}))
    for fields in (
        joined | {"incarnation": "a" * (NAME_CHARACTERS + 1)},
        joined | {"incarnation": "a", "gangs": [0] * (MOST_RANKS + 1)},
    ):
        with pytest.raises(ValidationError):
            FACT.validate_json(json.dumps(fields))
    sample = SAMPLE | {"device": "cpu", "phase": "FORWARD"}
    for issued in ({LONG: 1}, {str(number): 1 for number in range(65)}):
        with pytest.raises(ValidationError):
            RankSample.model_validate(sample | {"issued": issued})


@pytest.mark.parametrize("rates", [{str(n): 1.0 for n in range(65)}, {LONG: 1.0}])
def test_what_each_look_of_the_controller_reads_of_a_node_is_short(rates: dict[str, float]) -> None:
    device = {"index": 0, "name": "a", "memory_bytes": 1}
    with pytest.raises(ValidationError):
        Inventory.model_validate(INVENTORY | {"accelerators": [device] * 1_025})
    facts = dataclasses.asdict(FACTS)
    told = {"kind": "node_measured", "node_id": "a", "incarnation": "b", "device_type": "cpu"}
    FACT.validate_json(json.dumps(told | {"facts": facts}))
    with pytest.raises(ValidationError, match="dtypes"):
        FACT.validate_json(json.dumps(told | {"facts": facts | {"matmul_flops": rates}}))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (ExportManifest, "files"),
        (GangPlan, "ranks"),
        (Manifest, "shards"),
        (RankMetrics, "points"),
        (RankReady, "units"),
        (RankReady, "groups"),
    ],
)
def test_of_many_faults_in_a_record_the_first_is_told(record: type[BaseModel], field: str) -> None:
    """Each takes 700 bytes: of a record of some MiB all of them would be more than a node has."""
    with pytest.raises(ValidationError) as refused:
        record.model_validate_json(f'{{"{field}": [{"1," * 1_000}1]}}')
    assert sum(fault["loc"][0] == field for fault in refused.value.errors()) == 1


def test_of_many_errors_in_a_profile_the_first_of_each_list_is_reported() -> None:
    profile = {"units": [1] * 9_000, "parameters": [1] * 9_000}
    with pytest.raises(ValidationError) as refused:
        ModelProbed.model_validate({"node_id": "loom-1", "took_s": 1, "profile": profile})
    places = [fault["loc"] for fault in refused.value.errors()]
    assert [place for place in places if place[1:2] in (("units",), ("parameters",))] == [
        ("profile", "parameters", 0),
        ("profile", "units", 0),
    ]


@pytest.mark.parametrize("seconds", [1e308, "Infinity", "NaN", -1.0])
def test_a_duration_that_no_step_takes_is_refused(seconds: float | str) -> None:
    """Times the steps that are left it would overflow in every look at the queue."""
    with pytest.raises(ValidationError, match="step_time_s"):
        StepRecord.model_validate_json(
            f'{{"step":1,"fence":1,"loss":1,"tokens_per_s":1,"step_time_s":{seconds}}}'
        )


def test_a_rank_masks_its_texts_before_it_cuts_them_and_before_it_makes_a_name_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = ",".join(("value", "of", "the", "hub", "9"))
    monkeypatch.setattr(bounds, "_masks", [])
    bounds.mask_before_cuts(Mask({"HUB": secret}).text)
    points = [{"step": 1, "values": {"x" * before + secret: 1.0 for before in range(0, 64, 7)}}]
    told = RankMetrics.model_validate({"points": points}).model_dump_json()
    units = [f"{'x' * before}{secret}{'y' * NAME_CHARACTERS}" for before in range(0, 256, 7)]
    ready = {"units": units, "groups": [], "parameters": 1, "data_digest": ""}
    told += RankReady.model_validate(ready).model_dump_json()
    assert not any(secret.replace(",", "_")[at : at + 6] in told for at in range(len(secret) - 6))
    assert not any(secret[at : at + 6] in told for at in range(len(secret) - 6))
    assert "[secret HUB]" in told


def test_an_integer_that_no_float_holds_is_refused_wherever_an_agent_writes_one() -> None:
    facts = get_args(get_args(Fact)[0])
    kinds: tuple[type[BaseModel], ...] = (
        *(*facts, RankExit, Inventory, Manifest, JobCard),
        *(RankSample, StepRecord, MetricRecord, LogLine, RankStacks),
    )
    tried = []
    for kind in kinds:
        for name, field in kind.model_fields.items():
            if field.annotation in {int, int | None} or {Whole, Positive, Moment} & {
                *get_args(field.annotation)
            }:
                tried.append(f"{kind.__name__}.{name}")
                with pytest.raises(ValidationError) as refused:
                    kind.model_validate_json(f'{{"{name}": {"9" * 400}}}')
                where = {fault["loc"] for fault in refused.value.errors()}
                assert (name,) in where, tried[-1]
    assert {"RankSample.seen_ms", "RankSample.memory_bytes", "StepRecord.time_ms"} <= set(tried)
    assert len(tried) > 70


@pytest.mark.parametrize(
    ("kind", "field", "fields"),
    [
        (LogLine, "time_ms", {"rank": 0, "fence": 1, "stream": "stdout", "text": "x"}),
        (RankSample, "seen_ms", SAMPLE | {"device": "cpu", "phase": "F"}),
    ],
)
def test_a_time_after_the_year_9999_is_refused(
    kind: type[BaseModel], field: str, fields: dict[str, Any]
) -> None:
    """``meshloom logs --timestamps`` ended at the first line of one."""
    kind.model_validate(fields | {field: bounds.MOST_MS})
    with pytest.raises(ValidationError, match=field):
        kind.model_validate(fields | {field: bounds.MOST_MS + 1})


def test_of_many_baselines_no_more_are_looked_at_than_are_kept() -> None:
    """A line of a megabyte has room for a hundred thousand, and each look held up all gangs of a node."""

    class Endless(dict[str, float]):
        def items(self) -> Any:  # noqa: ANN401 no view of a dict, which is what is asked for
            return ((str(number), math.nan if number % 2 else 1.0) for number in itertools.count())

    fields = {"step": 1, "loss": 1.0, "tokens": 1, "baselines": Endless()}
    kept = Evaluated.model_validate(OF_GANG | fields).baselines
    assert kept == dict.fromkeys(map(str, range(0, 16, 2)), 1.0)


_OF_JOB = f'"job_id":"{JOB}","fence":1,"node_id":"loom-1"'
_NOT_IN_JSON = {
    "still_s": f'{{"kind":"gang_diagnosed",{_OF_JOB},"findings":'
    '{"why":"asked","still_s":%s,"allowed_s":1,"ranks":[]}}',
    "allowed_s": f'{{"kind":"gang_ended",{_OF_JOB},"exits":[],"last_step":1,"hang":'
    '{"why":"hang","still_s":1,"allowed_s":%s,"ranks":[]}}',
    "pulse_age_s": f'{{"kind":"gang_diagnosed",{_OF_JOB},"findings":{{"why":"asked","still_s":1,'
    '"allowed_s":1,"ranks":[{"rank":0,"pid":1,"phase":"F","pulse_age_s":%s}]}}',
    "took_s": f'{{"kind":"model_probed","probe_id":"probe_{"0" * 32}","node_id":"a","took_s":%s}}',
    "facts": '{"kind":"node_measured","node_id":"a","incarnation":"b","device_type":"cpu","facts":'
    '{"matmul_flops":{},"memory_bandwidth":1,"link_bandwidth":1,"network_bandwidth":1,'
    '"collective_latency":1,"ranks":1,"overlap":%s}}',
}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("field", _NOT_IN_JSON)
def test_a_number_for_which_json_has_no_word_is_refused_before_a_record_holds_it(
    field: str, number: str
) -> None:
    FACT.validate_json(_NOT_IN_JSON[field] % 1)
    with pytest.raises(ValidationError, match=field):
        FACT.validate_json(_NOT_IN_JSON[field] % number)


@pytest.mark.parametrize("rate", ["NaN", "1e999"])
def test_a_rate_that_no_client_could_read_makes_no_step(rate: str) -> None:
    step = '{"step":1,"fence":1,"loss":1,"step_time_s":1,"tokens_per_s":%s}'
    StepRecord.model_validate_json(step % 5)
    with pytest.raises(ValidationError, match="tokens_per_s"):
        StepRecord.model_validate_json(step % rate)
