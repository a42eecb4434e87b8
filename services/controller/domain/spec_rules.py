"""What the operator does not let a spec say."""

from services.contract.entry_points import EntryPoints, factories_of
from services.contract.problems import Fault
from services.contract.scripts import EntryPoint
from services.contract.secret_references import written_out
from services.contract.specs import JobSpec


def against_the_rules(spec: JobSpec, allowed: EntryPoints) -> list[Fault]:
    """Every place that names an entry point which is not allowed, or spells a credential out."""
    faults: list[Fault] = []
    for field, used in factories_of(spec):
        if not allowed.allows(used.factory):
            listed = ", ".join(allowed.prefixes or ()) or "nothing but built-ins"
            detail = (
                f"{field}.factory: {used.factory} is not allowed here; allowed is {listed} "
                "(MESHLOOM_FACTORY_PREFIXES of the controller and the agents)"
            )
            pointer = f"/{field}/factory"
            faults.append(Fault(pointer=pointer, detail=detail, code="factory_not_allowed"))
        faults += written_out(used.args, f"/{field}/args")
    if spec.entrypoint is not None:
        faults += _of_script(spec.entrypoint, allowed)
    return [*faults, *written_out(spec.labels, "/labels")]


def _of_script(entrypoint: EntryPoint, allowed: EntryPoints) -> list[Fault]:
    where = "script" if entrypoint.script is not None else "module"
    faults = list(written_out(list(entrypoint.args), "/entrypoint/args"))
    if not allowed.allows_script(entrypoint):
        listed = ", ".join(allowed.prefixes or ()) or "no script"
        detail = (
            f"entrypoint.{where}: {entrypoint.what} is not allowed here; allowed is {listed} "
            "(MESHLOOM_FACTORY_PREFIXES of the controller and the agents)"
        )
        pointer = f"/entrypoint/{where}"
        faults = [Fault(pointer=pointer, detail=detail, code="script_not_allowed"), *faults]
    return faults
