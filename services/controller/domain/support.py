"""What a spec can say and this version cannot do: refused, for a wish must not be passed over."""

from services.contract.built_ins import BUILT_IN_NAMES
from services.contract.problems import Fault
from services.contract.specs import Factory, JobSpec

_NOT_YET = "not_supported_yet"


def unsupported(spec: JobSpec) -> list[Fault]:
    """Every such place of the spec."""
    factories = {
        "model": spec.model,
        "data": spec.data,
        "optimizer": spec.optimizer,
        "schedule": spec.schedule,
    }
    faults = [fault for name, used in factories.items() for fault in _unknown(name, used)]
    plan = {} if spec.plan == "auto" else spec.plan
    for pointer, precision in (
        ("/train/precision/params", spec.train.precision.params),
        ("/train/precision/reduce", spec.train.precision.reduce),
        ("/plan/param_dtype", plan.get("param_dtype")),
        ("/plan/reduce_dtype", plan.get("reduce_dtype")),
    ):
        if precision == "fp16":
            why = "this version does not scale losses, without which fp16 underflows; take bf16"
            faults.append(_not_yet(pointer, why))
    return faults


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
