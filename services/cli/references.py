"""How commands name jobs, checkpoints and plans: by id, by the beginning of one, by name, or ``last``."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from services.cli.errors import CliError, UnknownNameError
from services.contract.words.ids import CheckpointId, JobId, PlanId, job_of_checkpoint
from services.contract.words.states import CheckpointState

if TYPE_CHECKING:
    from meshloom.client import RestClient as Client
    from services.contract.api.plan_views import PlanSummary
    from services.contract.api.views import CheckpointView, JobView

_T = TypeVar("_T")
_LAST: Final = "last"
_PAGE: Final = 200
_MOST_LOOKED_AT: Final = 2_000
_MOST_NAMED: Final = 5
_JOB_ID: Final = TypeAdapter[str](JobId)
_CHECKPOINT_ID: Final = TypeAdapter[str](CheckpointId)
_PLAN_ID: Final = TypeAdapter[str](PlanId)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KINDS: Final = {
    "job_": "job",
    "ckpt_": "checkpoint",
    "plan_": "plan",
    "tok_": "token",
    "trace_": "trace",
}
_LISTS: Final = {
    "job": "`meshloom ls` lists them",
    "checkpoint": "`meshloom checkpoints JOB` lists those of a job",
    "plan": "`meshloom plans` lists them",
}


Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's id or the beginning of one, its name, or 'last' for the newest.",
    ),
]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint's id or the beginning of one; or a job, or 'last': its newest committed one.",
    ),
]


def job_id_of(client: "Client", text: str) -> str:
    """The id of the job that a person names.

    A name is that of the newest job called so, and goes before the beginning of an id.

    Raises:
        CliError: There is none, or several have ids that begin so.
    """
    if _is(_JOB_ID, text):
        return text
    _check_kind(text, "job")
    if text == _LAST:
        return _newest(client).id
    found: list[JobView] = []
    for job in _jobs_with(client, text):
        if job.name == text:
            return job.id
        if _begins(job.id, "job_", text):
            found.append(job)
    return _only(text, "job", [(job.id, job.name) for job in found])


def checkpoint_id_of(client: "Client", text: str, job_id: str | None = None) -> str:
    """The id of the checkpoint that a person names.

    Args:
        client: Asked for what is not a whole id.
        text: An id, its beginning, ``last``, or (without ``job_id``) a job.
        job_id: Only this job's.

    Raises:
        CliError: There is none, or several have ids that begin so.
    """
    if _is(_CHECKPOINT_ID, text):
        return text
    if job_id is None and not text.startswith("ckpt_"):
        job_id, text = _job_with_checkpoints(client, text), _LAST
    _check_kind(text, "checkpoint")
    if text == _LAST and job_id is not None:
        return _newest_committed(client, job_id).id
    jobs = [job_id] if job_id else _jobs_of_checkpoint(client, text)
    known = (each for one in jobs for each in client.checkpoints(one).items)
    found = [each for each in known if _begins(each.id, "ckpt_", text)]
    return _only(text, "checkpoint", [(each.id, f"step {each.step}") for each in found])


def _job_with_checkpoints(client: "Client", text: str) -> str:
    try:
        return job_id_of(client, text)
    except UnknownNameError:
        raise UnknownNameError(
            f"no checkpoint has an id that begins with {text!r}, and no job is called so; "
            f"{_LISTS['checkpoint']}"
        ) from None


def plan_id_of(client: "Client", text: str) -> str:
    """The id of the plan that a person names: as of a job, among those of the last seven days.

    Raises:
        CliError: There is none, or several have ids that begin so.
    """
    if _is(_PLAN_ID, text):
        return text
    _check_kind(text, "plan")
    found: list[PlanSummary] = []
    for plan in _plans(client):
        if text in {plan.name, _LAST}:
            return plan.id
        if _begins(plan.id, "plan_", text):
            found.append(plan)
    return _only(text, "plan", [(plan.id, plan.name) for plan in found])


def _is(kind: TypeAdapter[str], text: str) -> bool:
    try:
        kind.validate_python(text)
    except ValidationError:
        return False
    return True


def _check_kind(text: str, wanted: str) -> None:
    """Refuse what can name nothing, and the id of another kind of thing."""
    if not _NAME.fullmatch(text):
        raise CliError(
            f"{text!r} is not a {wanted}: give an id, the beginning of one, a name or 'last'; "
            f"{_LISTS[wanted]}"
        )
    for prefix, kind in _KINDS.items():
        if kind != wanted and _is_id_of(prefix, text):
            of = f"; its job is {job_of_checkpoint(text)}" if kind == "checkpoint" else ""
            raise CliError(f"{text} is the id of a {kind}, not of a {wanted}{of}")


def _is_id_of(prefix: str, text: str) -> bool:
    return re.fullmatch(rf"{prefix}[0-7][0-9a-z]{{25}}(-s[0-9]+-a[0-9]+)?", text) is not None


def _begins(whole: str, prefix: str, text: str) -> bool:
    return whole.startswith((text, prefix + text))


def _newest(client: "Client") -> "JobView":
    newest = client.jobs(limit=1).items
    if not newest:
        raise CliError("there is no job yet; submit one with `meshloom submit FILE`")
    return newest[0]


def _newest_committed(client: "Client", job_id: str) -> "CheckpointView":
    known = client.checkpoints(job_id).items
    committed = [each for each in known if each.state is CheckpointState.COMMITTED]
    if not committed:
        raise CliError(f"{job_id} has no committed checkpoint yet")
    return max(committed, key=lambda each: each.step)


def _jobs_of_checkpoint(client: "Client", text: str) -> list[str]:
    """The jobs that may have checkpoints whose ids begin so."""
    start = text.removeprefix("ckpt_").partition("-")[0]
    if _is(_JOB_ID, f"job_{start}"):
        return [f"job_{start}"]
    return [job.id for job in _jobs_with(client, start) if _begins(job.id, "job_", start)]


def _jobs_with(client: "Client", text: str) -> "Iterator[JobView]":
    """Jobs with this text in their id or name, newest first."""
    cursor: dict[str, str] = {}
    for _ in range(0, _MOST_LOOKED_AT, _PAGE):
        page = client.jobs(limit=_PAGE, q=text, **cursor)
        yield from page.items
        if page.next_cursor is None:
            return
        cursor = {"cursor": page.next_cursor}


def _plans(client: "Client") -> "Iterator[PlanSummary]":
    cursor: dict[str, str] = {}
    for _ in range(0, _MOST_LOOKED_AT, _PAGE):
        page = client.plans(limit=_PAGE, **cursor)
        yield from page.items
        if page.next_cursor is None:
            return
        cursor = {"cursor": page.next_cursor}


def _only(text: str, kind: str, found: Iterable[tuple[str, str]]) -> str:
    known = list(found)
    if not known:
        raise UnknownNameError(
            f"no {kind} has the name {text!r}, or an id that begins so; {_LISTS[kind]}"
        )
    if len(known) > 1:
        lines = [f"\n  {identity}  {name}" for identity, name in known[:_MOST_NAMED]]
        more = len(known) - _MOST_NAMED
        rest = f"\n  and {more} more" if more > 0 else ""
        raise CliError(f"{text!r} begins the ids of {len(known)} {kind}s:{''.join(lines)}{rest}")
    return known[0][0]
