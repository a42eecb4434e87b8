"""From a spec to a sharding plan, without a look at the model.

It keeps what the spec says and fills in the default: all ranks in dp_shard; units and matrices to
split as they are known of built-in models. A user's model is one unit unless the plan names
others, for only a node can see how it is built: see ``layout`` for plans that are searched for.
"""

import dataclasses
from collections.abc import Sequence
from math import gcd
from typing import Any, Final

from pydantic import ValidationError

from fsdp_core.plan.model import (
    MeshPlan,
    Precision,
    ShardingPlan,
    TensorParallelPlan,
    UnitPlan,
)
from services.contract.jobs.plans import SHARDING_PLAN, GangPlan
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import Fault
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.scheduling.placement import Placed

_BUILT_IN_UNITS: Final = {"decoder": (UnitPlan(modules=("blocks.*",)),)}
_BUILT_IN_SPLITS: Final = {
    "decoder": (
        TensorParallelPlan(
            modules=(
                "blocks.*.attention.query",
                "blocks.*.attention.key",
                "blocks.*.attention.value",
                "blocks.*.feed_forward.gate",
                "blocks.*.feed_forward.up",
            ),
            style="colwise",
        ),
        TensorParallelPlan(
            modules=("blocks.*.attention.out", "blocks.*.feed_forward.down"), style="rowwise"
        ),
    )
}
_PLAN_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(ShardingPlan))
_MESH_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(MeshPlan))
_LISTS: Final = {
    "units": frozenset(field.name for field in dataclasses.fields(UnitPlan)),
    "tensor_parallel": frozenset(field.name for field in dataclasses.fields(TensorParallelPlan)),
}


def shard(spec: JobSpec, ranks: int | None = None) -> ShardingPlan:
    """The sharding plan of a job: what the spec says, and defaults for the rest.

    Args:
        spec: The job.
        ranks: One of ``spec.worlds``; without one, the first of them.

    Raises:
        InvalidRequestError: The plan or the mesh cannot be; it names every fault.
    """
    mesh = _mesh(spec, spec.fewest_ranks if ranks is None else ranks)
    asked = said(spec)
    faults = _unknown_fields(asked)
    try:
        plan = _merge(asked, mesh, spec)
    except ValidationError as error:
        faults += [_fault(detail) for detail in error.errors(include_url=False)]
        raise InvalidRequestError(faults) from error
    changes = "mesh" in asked and len(spec.worlds) > 1
    if plan.mesh != mesh or changes:
        why = "changes with its number of ranks" if changes else f"is {mesh}"
        detail = f"plan.mesh is {plan.mesh}, but the job's mesh {why}; leave it out"
        faults.append(Fault(pointer="/plan/mesh", detail=detail, code="mesh_mismatch"))
    faults += _split_faults(plan)
    if faults:
        raise InvalidRequestError(faults)
    return plan


def said(spec: JobSpec) -> dict[str, Any]:
    """What the spec says of the plan itself."""
    return dict(spec.plan) if isinstance(spec.plan, dict) else {}


def splits_of(spec: JobSpec) -> tuple[TensorParallelPlan, ...]:
    """What could be split over tp if nobody says: known of built-in models."""
    if spec.optimizer.factory == "muon":  # it takes whole matrices
        return ()
    return _BUILT_IN_SPLITS.get(_model(spec), ())


def planned(spec: JobSpec, sharding: ShardingPlan, micro_batch: int) -> JobSpec:
    """The spec with that very layout, of which nothing is left to be chosen.

    The mesh of an elastic job stays as asked: it follows its ranks. So do the micro-batch that
    is a rank's whole share, if to name it would leave the job fewer numbers of ranks, and whether
    ranks share memory, which depends on how many nodes they are on.
    """
    document = spec.model_dump(mode="json")
    mesh: object = dataclasses.asdict(sharding.mesh)
    plan = SHARDING_PLAN.dump_python(sharding, mode="json")
    if spec.resources.world is not None:
        mesh = document["mesh"]
        del plan["mesh"]
        if "shared_memory" not in said(spec):
            del plan["shared_memory"]
    train = document["train"] | {"micro_batch": micro_batch}
    as_asked = JobSpec.model_validate(document | {"mesh": mesh, "plan": plan})
    settled = JobSpec.model_validate(document | {"mesh": mesh, "plan": plan, "train": train})
    return settled if settled.worlds == as_asked.worlds else as_asked


def common_share(spec: JobSpec) -> int:
    """What divides a rank's share of the batch on every number of ranks that the job may have."""
    return gcd(*(spec.train.global_batch // (n // spec.share.tp) for n in spec.worlds))


def gang(spec: JobSpec, placed: Placed) -> GangPlan:
    """All that the ranks of an attempt must know: the sharding plan, and who sits where."""
    sharding = shard(spec, len(placed.ranks))
    return GangPlan(device_type=placed.device, sharding=sharding, ranks=placed.ranks)


def _model(spec: JobSpec) -> str:
    return "" if spec.model is None else spec.model.factory


def _mesh(spec: JobSpec, ranks: int) -> MeshPlan:
    asked = spec.mesh
    if asked == "auto":
        return MeshPlan(dp_shard=ranks)
    copy = asked.dp_shard * asked.tp
    return MeshPlan(dp_replicate=ranks // copy, dp_shard=asked.dp_shard, tp=asked.tp)


def _split_faults(plan: ShardingPlan) -> list[Fault]:
    tp, splits = plan.mesh.tp, plan.tensor_parallel
    if (tp > 1) == bool(splits):
        return []
    detail = (
        f"mesh.tp is {tp}, but the plan names no modules to split over these ranks: list them, "
        "such as [{modules: [blocks.*.up], style: colwise}]"
        if tp > 1
        else "mesh.tp is 1: there is nothing to split over; leave it out, or give mesh.tp ranks"
    )
    return [Fault(pointer="/plan/tensor_parallel", detail=detail, code="tensor_parallel_mismatch")]


def _merge(asked: dict[str, Any], mesh: MeshPlan, spec: JobSpec) -> ShardingPlan:
    """The plan that is asked for, on top of the one that would have been chosen."""
    precision = spec.train.precision
    units = _BUILT_IN_UNITS.get(_model(spec), ())
    # Parameters are kept in fp32: to gather them in fp32 is not to cast them.
    param: Precision | None = None if precision.params == "fp32" else precision.params
    reduce: Precision | None = None if precision.reduce == precision.params else precision.reduce
    splits = _BUILT_IN_SPLITS.get(_model(spec), ()) if mesh.tp > 1 else ()
    chosen = ShardingPlan(
        mesh=mesh,
        units=units,
        param_dtype=param,
        reduce_dtype=reduce,
        tensor_parallel=splits,
        shared_memory="auto",
    )
    known = {key: value for key, value in asked.items() if key in _PLAN_FIELDS}
    return SHARDING_PLAN.validate_python(dataclasses.asdict(chosen) | known)


def _unknown_fields(asked: dict[str, Any]) -> list[Fault]:
    places = [(f"/plan/{key}", key in _PLAN_FIELDS) for key in asked]
    mesh = asked.get("mesh")
    if isinstance(mesh, dict):
        places += [(f"/plan/mesh/{key}", key in _MESH_FIELDS) for key in mesh]
    for name, fields in _LISTS.items():
        entries = asked.get(name)
        if isinstance(entries, Sequence) and not isinstance(entries, str):
            places += [
                (f"/plan/{name}/{index}/{key}", key in fields)
                for index, entry in enumerate(entries)
                if isinstance(entry, dict)
                for key in entry
            ]
    return [
        Fault(pointer=place, detail="there is no such field in a plan", code="extra_forbidden")
        for place, is_known in places
        if not is_known
    ]


def _fault(detail: Any) -> Fault:  # noqa: ANN401 pydantic's ErrorDetails, a plain dict
    path = "".join(f"/{part}" for part in detail["loc"])
    return Fault(
        pointer=f"/plan{path}",
        detail=str(detail["msg"]).removeprefix("Value error, "),
        code=str(detail["type"]),
    )
