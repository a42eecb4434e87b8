"""What a spec can say and this version cannot do: refused, for a request must not be passed over."""

from services.contract.jobs.built_ins import BUILT_IN_NAMES
from services.contract.jobs.entry_points import factories_of, is_entry_point
from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import Fault

_NOT_YET = "not_supported_yet"


def unsupported(spec: JobSpec) -> list[Fault]:
    """Every such place of the spec; what a script does is its own."""
    if spec.entrypoint is not None:
        return []
    faults = [fault for name, used in factories_of(spec) for fault in _unknown(name, used)]
    if spec.optimizer.factory == "muon" and spec.mesh != "auto" and spec.mesh.tp > 1:
        why = "muon needs whole matrices, but tensor parallelism splits them; use tp 1, or adamw"
        faults.append(_not_yet("/mesh/tp", why))
    return faults


def _unknown(field: str, used: Factory) -> list[Fault]:
    choices = BUILT_IN_NAMES[field]
    if is_entry_point(used.factory) or used.factory in choices:
        return []
    choose = f"choose one of {', '.join(sorted(choices))}, or " if choices else ""
    why = f"there is no built-in {used.factory!r}; {choose}write package.module:callable"
    return [_not_yet(f"/{field.replace('.', '/')}/factory", why)]


def _not_yet(pointer: str, why: str) -> Fault:
    name = pointer.removeprefix("/").replace("/", ".")
    return Fault(pointer=pointer, detail=f"{name}: {why}", code=_NOT_YET)
