"""What people may change of a job after they submitted it."""

import json
from math import gcd
from typing import Any, Final

from pydantic import ValidationError

from services.contract.api.merge_patch import merged
from services.contract.api.pointers import faults_of
from services.contract.jobs.secret_references import written_out
from services.contract.jobs.specs import JobSpec
from services.contract.words.bounds import metric_name
from services.contract.words.problems import Fault
from services.controller.domain.decisions.checkpoint_facts import retire_surplus
from services.controller.domain.errors import InvalidRequestError, PreconditionFailedError
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import PatchAsked
from services.controller.domain.job.job import Job, Planning
from services.controller.domain.plans import default_plan

# An event is kept ten thousand times, in three places, and read a thousand at a time: what a patch with 64 labels
# changes takes forty kilobytes, and was said twice.
_TOLD_CHARACTERS: Final = 2_000
_FIXED: Final = Fault(
    pointer="/resources/world",
    detail="resources.world: the job has a fixed number of ranks; clone it with "
    "resources: {ranks: null, world: {min: …, max: …}} for an elastic job",
    code="not_elastic",
)


def on_patch(event: PatchAsked, draft: Draft) -> None:
    """Take the patch into the spec; one that changes nothing makes no new revision.

    Raises:
        PreconditionFailedError: The job has another revision than those that were named.
        InvalidRequestError: With the patch, the spec would be none.
    """
    job = draft.job
    if event.revisions is not None and job.revision not in event.revisions:
        raise PreconditionFailedError(
            f"the job was changed since it was read (it has revision {job.revision} now); "
            "read it again and send the change with its new ETag"
        )
    patch = event.patch.model_dump(mode="json", exclude_unset=True)
    if job.spec.resources.world is None and patch.get("resources", {}).get("world"):
        raise InvalidRequestError([_FIXED])
    asked = None if job.asked is None else with_patch(job.asked, patch)
    after = with_patch(job.spec, patch | _fitting(job.spec, asked))
    if faults := [*written_out(event.patch.labels or {}, "/labels"), *_unknown_metric(job, after)]:
        raise InvalidRequestError(faults)
    if after == job.spec:
        return
    changed = _differences(job.spec.model_dump(mode="json"), after.model_dump(mode="json"), "")
    draft.change(spec=after, asked=asked, revision=job.revision + 1)
    if job.planning is not None and after.resources != job.spec.resources:
        draft.change(planning=Planning())
    _note(draft, changed)
    if after.checkpoint != job.spec.checkpoint:
        retire_surplus(draft)


def _unknown_metric(job: Job, after: JobSpec) -> list[Fault]:
    """A metric for ``keep_best`` that evaluations so far did not have: the next attempt would fail."""
    wanted, before = after.checkpoint.keep_best, job.spec.checkpoint.keep_best
    is_known = wanted is None or (before is not None and before.metric == wanted.metric)
    if wanted is None or is_known or not job.attempts:
        return []
    given = {name for each in job.evaluations for name in ("loss", *each.metrics)}
    if metric_name(wanted.metric) in given:
        return []
    had = f"they gave {', '.join(sorted(given))}" if given else "there was none"
    detail = (
        f"checkpoint.keep_best.metric: no evaluation of the job has had {wanted.metric} so far ({had}); "
        "name another, or clone the job"
    )
    return [Fault(pointer="/checkpoint/keep_best/metric", detail=detail, code="unknown_metric")]


def _fitting(spec: JobSpec, asked: JobSpec | None) -> dict[str, Any]:
    """A micro-batch that was chosen gives way to new bounds: it goes into every rank's share."""
    chosen = spec.train.micro_batch
    if asked is None or asked.train.micro_batch != "auto" or chosen == "auto":
        return {}
    if asked.resources == spec.resources:
        return {}
    return {"train": {"micro_batch": gcd(chosen, default_plan.common_share(asked))}}


def with_patch(spec: JobSpec, patch: dict[str, Any], prefix: str = "") -> JobSpec:
    """The spec with a merge-patch.

    Raises:
        InvalidRequestError: It would be none; the pointers begin with ``prefix``.
    """
    document = merged(spec.model_dump(mode="json"), patch)
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        faults = faults_of(error.errors(include_url=False), document)
        raise InvalidRequestError(
            [f.model_copy(update={"pointer": f"{prefix}{f.pointer}"}) for f in faults]
        ) from error


def _differences(
    before: dict[str, Any], after: dict[str, Any], place: str
) -> dict[str, list[object]]:
    """What was and what is, by JSON pointer."""
    found: dict[str, list[object]] = {}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        here = f"{place}/{key.replace('~', '~0').replace('/', '~1')}"
        if isinstance(old, dict) and isinstance(new, dict):
            found |= _differences(old, new, here)
        elif old != new:
            found[here] = [old, new]
    return found


def _note(draft: Draft, changed: dict[str, list[object]]) -> None:
    """Tell what changed, as far as that is short."""
    room, told, more = _TOLD_CHARACTERS, dict[str, list[object]](), {}
    for place, pair in changed.items():
        room -= len(place) + len(json.dumps(pair))
        if room < 0:
            more = {"left_out": len(changed) - len(told)}
            break
        told[place] = pair
    words = [f"{place[1:]} {_told(pair)}" for place, pair in told.items()]
    words += [f"and {n} more" if told else f"{n} too long to tell" for n in more.values()]
    draft.note("job.patched", f"changed on request: {'; '.join(words)}", changed=told, **more)


def _told(pair: list[object]) -> str:
    old, new = pair
    if old is None:
        return f"is {new}"
    return "is taken away" if new is None else f"from {old} to {new}"
