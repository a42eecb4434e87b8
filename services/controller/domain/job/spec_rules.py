"""What the operator does not let a spec say."""

from services.contract.jobs.entry_points import EntryPoints, factories_of, trackers_of
from services.contract.jobs.scripts import EntryPoint
from services.contract.jobs.secret_references import written_out
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import Fault


def against_the_rules(spec: JobSpec, allowed: EntryPoints) -> list[Fault]:
    """Every place that names an entry point or a server which is not allowed, or spells a credential out."""
    faults: list[Fault] = []
    if spec.code is not None and not allowed.take_uploads:
        detail = (
            "code: uploaded code is disabled, because entry points are restricted "
            "(MESHLOOM_FACTORY_PREFIXES); set MESHLOOM_UPLOADED_CODE=true on the controller and "
            "the agents to allow it"
        )
        faults.append(Fault(pointer="/code", detail=detail, code="code_not_allowed"))
    for field, used in factories_of(spec):
        place = f"/{field.replace('.', '/')}"
        if not allowed.allows_of(spec, used.factory):
            listed = ", ".join(allowed.prefixes or ()) or "only built-ins"
            detail = (
                f"{field}.factory: {used.factory} is not allowed here; allowed: {listed} "
                "(MESHLOOM_FACTORY_PREFIXES of the controller and the agents)"
            )
            pointer = f"{place}/factory"
            faults.append(Fault(pointer=pointer, detail=detail, code="factory_not_allowed"))
        faults += written_out(used.args, f"{place}/args")
    if spec.entrypoint is not None:
        faults += written_out(list(spec.entrypoint.args), "/entrypoint/args")
        if not allowed.allows_script_of(spec):
            faults.append(_not_allowed(spec.entrypoint, allowed))
    if spec.metrics is not None:
        faults += written_out(spec.metrics.model_dump(), "/metrics")
    for field, server in trackers_of(spec):
        if not allowed.allows_tracker_of(spec, server):
            detail = (
                f"{field}: this server is not allowed here; allowed: {', '.join(allowed.trackers) or 'none'} "
                "(MESHLOOM_TRACKER_SERVERS of the controller and the agents)"
            )
            pointer = f"/{field.replace('.', '/')}"
            faults.append(Fault(pointer=pointer, detail=detail, code="tracker_not_allowed"))
    return [*faults, *written_out(spec.labels, "/labels")]


def _not_allowed(entrypoint: EntryPoint, allowed: EntryPoints) -> Fault:
    where = "script" if entrypoint.script is not None else "module"
    listed = ", ".join(allowed.prefixes or ()) or "no script"
    detail = (
        f"entrypoint.{where}: {entrypoint.what} is not allowed here; allowed: {listed} "
        "(MESHLOOM_FACTORY_PREFIXES of the controller and the agents)"
    )
    return Fault(pointer=f"/entrypoint/{where}", detail=detail, code="script_not_allowed")
