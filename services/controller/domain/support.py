"""What a spec can say and this version cannot do: refused, for a wish must not be passed over."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.contract.built_ins import BUILT_IN_NAMES
from services.contract.problems import Fault
from services.contract.specs import Factory, JobSpec
from services.controller.domain import planner

_NOT_YET = "not_supported_yet"


def unsupported(spec: JobSpec) -> list[Fault]:
    """Every such place of the spec; what a script does is its own."""
    if spec.entrypoint is not None:
        return []
    factories = {
        "model": spec.model,
        "data": spec.data,
        "optimizer": spec.optimizer,
        "schedule": spec.schedule,
    }
    faults = [fault for name, used in factories.items() for fault in _unknown(name, used)]
    for pointer, precision in (
        ("/train/precision/params", spec.train.precision.params),
        ("/train/precision/reduce", spec.train.precision.reduce),
        *_precisions_of_plan(planner.said(spec)),
    ):
        if precision == "fp16":
            why = "this version does not scale losses, without which fp16 underflows; take bf16"
            faults.append(_not_yet(pointer, why))
    return faults


def _precisions_of_plan(plan: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Of the whole plan and of each unit; whatever is no plan at all is the planner's to refuse."""
    units = plan.get("units")
    parts = [("/plan", plan)]
    if isinstance(units, list | tuple):
        parts += [(f"/plan/units/{i}", unit) for i, unit in enumerate(units)]
    for pointer, part in parts:
        if isinstance(part, Mapping):
            for name in ("param_dtype", "reduce_dtype"):
                yield f"{pointer}/{name}", part.get(name)


def _unknown(field: str, used: Factory) -> list[Fault]:
    choices = BUILT_IN_NAMES[field]
    if ":" in used.factory or used.factory in choices:
        return []
    why = (
        f"there is no built-in {used.factory!r}; choose one of {', '.join(sorted(choices))}, "
        "or write package.module:callable"
    )
    return [_not_yet(f"/{field}/factory", why)]


def _not_yet(pointer: str, why: str) -> Fault:
    name = pointer.removeprefix("/").replace("/", ".")
    return Fault(pointer=pointer, detail=f"{name}: {why}", code=_NOT_YET)
