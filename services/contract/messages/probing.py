"""A model that is profiled on a node before any rank of it runs, and what nodes measure of themselves."""

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, WrapValidator
from pydantic_core import SchemaValidator

from fsdp_core.plan.model import (
    Conditions,
    ModelProfile,
    NodeFacts,
    OptimizerFacts,
    TensorParallelPlan,
)
from services.contract.jobs.specs import CarriedSpec
from services.contract.messages.base import Message
from services.contract.messages.rank_pipe import ThroughputUnit
from services.contract.words.bounds import Details, Incarnation, Positive, Seconds, Text, Traceback
from services.contract.words.ids import NodeId, ProbeId

DeviceType = Literal["cpu", "cuda"]
# A node probes one model at a time, and may be at another one first.
PROBES_WAITED_FOR: Final = 2
_MOST_DTYPES: Final = 64
_DTYPE_CHARACTERS: Final = 32


def _failing_fast(schema: Any) -> Any:  # noqa: ANN401 (any part of a core schema)
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _failing_fast(part) for name, part in schema.items()}
    if changed.get("type") in ("list", "tuple"):
        changed["fail_fast"] = True
    return changed


@functools.cache
def _profile_validator() -> SchemaValidator:
    """What checks a profile, and reports the first error of each list.

    A profile comes from a process that ran user code, and a million errors would take a gigabyte. It is made when
    the first profile comes: clients import this module and read none.
    """
    # The engine's dataclasses know nothing of pydantic, so ``FailFast`` cannot stand in them.
    return SchemaValidator(_failing_fast(TypeAdapter(ModelProfile).core_schema))


def _few_and_finite(facts: object) -> object:
    """What a node measured, which each look of the controller reads again."""
    if isinstance(facts, Mapping):
        json.dumps(facts, allow_nan=False)  # what it refuses cannot be read again
    rates = facts.get("matmul_flops") if isinstance(facts, Mapping) else None
    if isinstance(rates, Mapping) and (
        len(rates) > _MOST_DTYPES or any(len(name) > _DTYPE_CHARACTERS for name in rates)
    ):
        raise ValueError(f"more than {_MOST_DTYPES} dtypes, or a name that no dtype has")
    return facts


MeasuredFacts = Annotated[NodeFacts, BeforeValidator(_few_and_finite)]
Profile = Annotated[
    ModelProfile, WrapValidator(lambda value, _: _profile_validator().validate_python(value))
]


class ProbeModel(Message):
    """Profile the model of a spec in a process of its own, under these limits.

    Args:
        probe_id: Names the question, so that its answer serves whoever asks the same.
        spec: Whose model, data, optimizer and precision are meant; its mesh and plan are not.
        device_type: Whose memory is meant; the node has such a device.
        conditions: Under which steps are followed.
        stops: Modules that a plan names as units, patterns among them.
        tensor_parallel: What is split where a condition has ``tp`` above 1.
        timeout_s: After which the process is killed; starting it does not count.
        memory_bytes: Of private memory beyond what PyTorch itself takes; None: half of what the
            node has free.
        owner: Whose plan needs it first: a node answers a question of each in turn. A controller of the
            last release does not say.
    """

    kind: Literal["probe_model"] = "probe_model"
    probe_id: ProbeId
    spec: CarriedSpec
    device_type: DeviceType
    conditions: tuple[Conditions, ...] = Field(min_length=1)
    stops: tuple[str, ...] = ()
    tensor_parallel: tuple[TensorParallelPlan, ...] = ()
    timeout_s: float = Field(default=120.0, gt=0)
    memory_bytes: int | None = Field(default=None, gt=0)
    owner: str = ""


class ProbeFailure(Message):
    """Why there is no profile: the code tells programs, the reason tells people what to do.

    ``wrong_spec``: a rank would fail in the same way. All others say nothing about that.
    """

    code: Literal["timed_out", "out_of_memory", "crashed", "refused", "raised", "wrong_spec"]
    reason: Text
    traceback: Traceback | None = None


class ModelProbed(Message):
    """The answer to a probe: exactly one of ``profile`` (with all else) and ``failure`` is there.

    ``sequence_tokens``: tokens that a sequence of the data predicts; 1 where it has none, which
    ``throughput_unit`` says.
    """

    kind: Literal["model_probed"] = "model_probed"
    probe_id: ProbeId
    node_id: NodeId
    took_s: Seconds
    profile: Profile | None = None
    optimizer: OptimizerFacts | None = None
    sequence_tokens: Positive | None = None
    throughput_unit: ThroughputUnit = "tokens"
    failure: ProbeFailure | None = None


class MeasureNode(Message):
    """Measure what the node's devices do in a second, unless that is known already."""

    kind: Literal["measure_node"] = "measure_node"
    device_type: DeviceType


class NodeMeasured(Message):
    """What an agent's self-test found, for each rank with the others at work.

    ``detail``: how it was found, for people.
    """

    kind: Literal["node_measured"] = "node_measured"
    node_id: NodeId
    incarnation: Incarnation
    device_type: DeviceType
    facts: MeasuredFacts | None = None
    failure: Text | None = None
    detail: Details = Field(default_factory=dict)
