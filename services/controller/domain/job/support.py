"""What a spec can say and this version cannot do: refused, for a request must not be passed over."""

from collections.abc import Sequence
from itertools import islice

from services.contract.api.pointers import pointer_of
from services.contract.jobs.built_ins import misuse
from services.contract.jobs.entry_points import factories_of
from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import MOST_FAULTS, Fault

_NOT_YET = "not_supported_yet"


def unsupported(spec: JobSpec, known: Sequence[Fault] = ()) -> list[Fault]:
    """Every such place of the spec, but those with a fault that is known; what a script does is its own."""
    if spec.entrypoint is not None:
        return []
    faults = [fault for name, used in factories_of(spec) for fault in _unknown(name, used)]
    if spec.optimizer.factory == "muon" and spec.mesh != "auto" and spec.mesh.tp > 1:
        why = "muon needs whole matrices, but tensor parallelism splits them; use tp 1, or adamw"
        faults.append(_not_yet("/mesh/tp", why))
    places = {fault.pointer for fault in known}
    return [fault for fault in faults if fault.pointer not in places]


def _unknown(field: str, used: Factory) -> list[Fault]:
    at = f"/{field.replace('.', '/')}"
    return [
        _not_yet(at + pointer_of(place), why)
        for place, why in islice(misuse(field, used.factory, used.args), MOST_FAULTS + 1)
    ]


def _not_yet(pointer: str, why: str) -> Fault:
    name = pointer.removeprefix("/").replace("/", ".")
    return Fault(pointer=pointer, detail=f"{name}: {why.removeprefix(f'{name}: ')}", code=_NOT_YET)
