"""Two versions of controller and agent read each other's messages; people's specs stay strict."""

import typing
from collections.abc import Mapping
from typing import Any, Final

import pytest
from pydantic import BaseModel, ValidationError

from services.contract.jobs.specs import JobSpec
from services.contract.messages.base import Message
from services.contract.messages.commands import Command, LaunchGang
from services.contract.messages.facts import Fact
from services.contract.messages.telemetry import (
    LogLine,
    MetricRecord,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.contract.words.ids import checkpoint_id, new_job_id, new_trace_id

NODE = "loom-1"
JOB = new_job_id(1, bytes(10))
CHECKPOINT = checkpoint_id(JOB, 10, 1)
OF_TOMORROW: Final[Mapping[str, object]] = {"of_tomorrow": {"a": [1]}}
SPEC: dict[str, Any] = {
    "model": {"factory": "decoder", "args": {"width": 8}},
    "data": {"factory": "stdlib_bytes"},
    "train": {"steps": 10},
    "mesh": {"dp_shard": 1},
}
PLAN = {
    "device_type": "cpu",
    "sharding": {"mesh": {"dp_shard": 1}},
    "ranks": [{"rank": 0, "node_id": NODE, "local_rank": 0, "device": "cpu"}],
}
SHARD = {"rank": 0, "name": "rank-0.bin", "bytes": 7, "sha256": "ab" * 32}
MANIFEST = {
    "job_id": JOB,
    "checkpoint_id": CHECKPOINT,
    "fence": 1,
    "step": 10,
    "world_size": 1,
    "shards": [SHARD],
}
TRACE = new_trace_id(1, bytes(10))
NUMBERS = (
    "step",
    "number",
    "bytes",
    "tokens",
    "loss",
    "took_s",
    "last_step",
    "rank",
    "local_rank",
    "pid",
    "time_ms",
    "tokens_per_s",
    "step_time_s",
    "grace_s",
)
SEEN = {"rank": 0, "pid": 1, "phase": "DATA"}
REQUIRED: Final[Mapping[str, object]] = {
    "job_id": JOB,
    "node_id": NODE,
    "fence": 1,
    "checkpoint_id": CHECKPOINT,
    "trace_id": TRACE,
    "trace_ids": [TRACE],
    "probe_id": "probe_" + "0" * 32,
    "spec": SPEC,
    "plan": PLAN,
    "shard": SHARD,
    "manifest": MANIFEST,
    "manifests": {1: MANIFEST},
    "card": {
        "job_id": JOB,
        "spec": SPEC,
        "owner": "alice",
        "created_ms": 1,
        "fence": 1,
        "plan": PLAN,
    },
    "inventory": {"hostname": "loom", "cpu_slots": 1, "cpu_count": 1, "memory_bytes": 1},
    "records": [{"number": 1, "name": "1.json", "reason": "torn"}],
    "findings": {"why": "asked", "still_s": 0, "allowed_s": 0, "ranks": [SEEN]},
    "exits": [SEEN | {"exit_code": 1, "order": 0, "step": 3}],
    "ranks": [0],
    "steps": 3,
    "path": "/checkpoints/rank-0",
    "first_step": 1,
    "files": ["model.safetensors"],
    "conditions": [{}],
    "pids": {0: 1},
    "mode": "kill",
    "device_type": "cpu",
    "device": "cpu",
    "incarnation": "life-1",
    "phase": "DATA",
    "stream": "stdout",
    "reason": "because",
    "condition": "its disk is full",
    "standing": "PAUSED",
    "file": "rank-0.bin",
    "text": "a line",
    "asked": "0123456789abcdef",
    "replica": 1,
    "life": 2,
    "store": {"host": "127.0.0.1", "port": 4000},
    "epoch": 1,
    "of": 1,
    "replicas": {"epoch": 1, "members": [0, 1], "host": "127.0.0.1", "port": 4000},
} | dict.fromkeys(NUMBERS, 1)


def members(union: object) -> list[type[Message]]:
    return list(typing.get_args(typing.get_args(union)[0]))


SPOKEN: Final[list[type[Message]]] = [
    *members(Fact),
    *members(Command),
    RankSample,
    RankStacks,
    StepRecord,
    MetricRecord,
    LogLine,
]


def of_yesterday(kind: type[BaseModel]) -> dict[str, Any]:
    """A message without any field that has a default, as a version that lacks them writes it."""
    fields = kind.model_fields.items()
    said = {name: REQUIRED[name] for name, field in fields if field.is_required()}
    return said | ({"kind": fields_kind} if (fields_kind := _kind(kind)) else {})


def _kind(kind: type[BaseModel]) -> str | None:
    field = kind.model_fields.get("kind")
    return None if field is None else str(field.default)


def with_new_fields(value: object) -> object:
    """What a newer version writes: a field more in each object, but for the spec."""
    if isinstance(value, list):
        return [with_new_fields(item) for item in value]
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return value
    known = {n: v if n == "spec" else with_new_fields(v) for n, v in value.items()}
    return {**OF_TOMORROW, **known}


@pytest.mark.parametrize("kind", SPOKEN, ids=lambda kind: kind.__name__)
def test_a_message_is_read_with_fields_of_a_newer_version_and_without_those_of_its_own(
    kind: type[Message],
) -> None:
    known = kind.model_validate(of_yesterday(kind))
    assert kind.model_validate(with_new_fields(of_yesterday(kind))) == known
    assert kind.model_validate_json(known.model_dump_json()) == known


@pytest.mark.parametrize("unset", [None, False, 0, "", [], {}])
@pytest.mark.parametrize("where", [(), ("train",), ("mesh",)], ids=str)
def test_a_spec_that_leaves_a_new_field_unset_is_carried_out(
    where: tuple[str, ...], unset: object
) -> None:
    said = of_yesterday(LaunchGang)
    known = LaunchGang.model_validate(said)
    spec = spec_with(where, unset)
    assert LaunchGang.model_validate(said | {"spec": spec}) == known
    with pytest.raises(ValidationError, match="of_tomorrow"):
        JobSpec.model_validate(spec)  # a person's: what is unknown is a mistake


@pytest.mark.parametrize("where", [(), ("train",), ("mesh",), ("model",)], ids=str)
def test_a_spec_that_sets_a_new_field_is_refused_by_the_name_of_the_field(
    where: tuple[str, ...],
) -> None:
    said = of_yesterday(LaunchGang) | {"spec": spec_with(where, "adamw_of_tomorrow")}
    with pytest.raises(ValidationError, match="of_tomorrow"):
        LaunchGang.model_validate(said)


def spec_with(where: tuple[str, ...], value: object) -> dict[str, Any]:
    if not where:
        return SPEC | {"of_tomorrow": value}
    return SPEC | {where[0]: SPEC[where[0]] | {"of_tomorrow": value}}
