"""What Redis stores of a job, how it is read, and what is known from the last time.

A record is split by how its parts change: ``doc`` has what changes at any commit, ``spec``, ``plan`` and
``attempts`` are fields of the same hash that are written when they change. A ``doc`` without the mark is
whole: older versions wrote such, and so does who does not lead (see ``RedisJobs.commit``).
"""

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from services.contract.jobs.bounded_json import JUDGED
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import in_turns
from services.controller.domain.errors import RecordUnreadableError
from services.controller.domain.job.checkpoint import Checkpoint
from services.controller.domain.job.job import Job
from services.controller.ports.jobs import Stored

PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"spec": ("spec", "asked"), "plan": ("plan", "estimate"), "attempts": ("attempts",)}
)
"""By field of the hash, which fields of a job it has."""
SPLIT_MARK: Final = '{"split":1,'
"""With this begins a ``doc`` that lacks the parts."""
_IN_PARTS: Final = frozenset(name for names in PARTS.values() for name in names)
_VERSION: Final = TypeAdapter(Annotated[int, Field(ge=1)])
_KEPT_CHARACTERS: Final = 16 << 20
_KEPT_OF_ENDED: Final = 2 << 20


class Row(NamedTuple):
    """What is stored of a job; None where a key has another type. ``parts``: as in ``PARTS``."""

    job_id: str
    doc: str | None
    version: str | None
    checkpoints: dict[str, str] | None
    parts: tuple[str | None, ...] = ()

    @property
    def whole(self) -> str:
        """The job as one JSON object."""
        doc = self.doc or ""
        if not doc.startswith(SPLIT_MARK):
            return doc
        parts = [part[1:-1] for part in self.parts if part is not None]
        return "".join(["{", ",".join([*parts, doc.removeprefix(SPLIT_MARK)])])


def split(job: Job, before: Job | None) -> tuple[str, dict[str, str]]:
    """A job's ``doc`` with the mark, and those of its parts that differ from ``before`` (None: all)."""
    doc = job.model_dump_json(exclude=set(_IN_PARTS))
    changed = {
        part: job.model_dump_json(include=set(names))
        for part, names in PARTS.items()
        if before is None or any(_differ(job, before, name) for name in names)
    }
    return f"{SPLIT_MARK}{doc[1:]}", changed


def _differ(job: Job, before: Job, name: str) -> bool:
    one, other = getattr(job, name), getattr(before, name)
    return one is not other and one != other


def keys_of_commit(job_id: str) -> list[str]:
    """The keys of a job as a commit takes them."""
    return [
        keys.job(job_id),
        keys.ACTIVE_JOBS,
        keys.EPOCH,
        keys.job_events(job_id),
        keys.job_checkpoints(job_id),
        keys.job_history(job_id),
        keys.job_stacks(job_id),
        keys.CHANGED_JOBS,
        keys.EVENT_FEED,
    ]


def keys_of_deletion(job_id: str) -> list[str]:
    """The keys of a job that is deleted, as the scripts take them."""
    return [
        keys.job(job_id),
        keys.JOBS,
        keys.DELETED_JOBS,
        keys.job_events(job_id),
        keys.job_stacks(job_id),
        keys.job_checkpoints(job_id),
        keys.job_history(job_id),
        keys.job_last(job_id),
        keys.job_older_events(job_id),
    ]


def read_row(row: Row, parsed: Mapping[str, Checkpoint] = MappingProxyType({})) -> Stored:
    """The job of a row; ``parsed``: those of its checkpoints that are known already.

    Raises:
        RecordUnreadableError: It makes no sense here.
    """
    if row.doc is None or row.checkpoints is None:
        key = keys.job(row.job_id) if row.doc is None else keys.job_checkpoints(row.job_id)
        raise RecordUnreadableError(unreadable(row.job_id, f"{key} has another type"))
    if row.doc.startswith(SPLIT_MARK) and (len(row.parts) < len(PARTS) or None in row.parts):
        raise RecordUnreadableError(unreadable(row.job_id, "parts of it are missing"))
    try:
        version = _VERSION.validate_python(row.version)
        checkpoints = {
            name: parsed.get(name) or Checkpoint.model_validate_json(text)
            for name, text in row.checkpoints.items()
        }
        job = Job.model_validate_json(row.whole, context=JUDGED)
    except ValidationError as error:
        raise RecordUnreadableError(unreadable(row.job_id, "its log says why")) from error
    return Stored(job.model_copy(update={"checkpoints": checkpoints}), version)


async def read_by_turns(
    row: Row, parsed: Mapping[str, Checkpoint] = MappingProxyType({})
) -> Stored:
    """As ``read_row``, by turns of the loop: a job may have thousands of checkpoints, which take half a second.

    Raises:
        RecordUnreadableError: It makes no sense here.
    """
    found = dict(parsed)
    with contextlib.suppress(ValidationError):  # what cannot be read is told below
        async for name, text in in_turns((row.checkpoints or {}).items()):
            if name not in found:
                found[name] = Checkpoint.model_validate_json(text)
    return read_row(row, found)


def unreadable(job_id: str, why: str) -> str:
    """In words for people."""
    return (
        f"the record of job {job_id} cannot be read by this version of the controller; "
        f"{why}, and DELETE forgets the job"
    )


class KnownRows:
    """Jobs as they were read last: the loops read active ones each second, and few of them change.

    Of jobs that have ended much less is kept, for whoever looks at the same list again: else what a
    controller takes would grow with each job that ends.

    Args:
        characters: So much of records of jobs that have not ended is kept, those that were used last.
        ended_characters: The same of jobs that have.
    """

    def __init__(
        self, characters: int = _KEPT_CHARACTERS, ended_characters: int = _KEPT_OF_ENDED
    ) -> None:
        self._open = _Rows(characters)
        self._ended = _Rows(ended_characters)

    def get(self, row: Row) -> Stored | None:
        """The job of a row that is the same to the letter as when it was read."""
        return self._open.get(row) or self._ended.get(row)

    def unchanged(self, row: Row) -> dict[str, Checkpoint]:
        """Those of the row's checkpoints that are the same to the letter as when they were read."""
        known = self._open.last(row.job_id) or self._ended.last(row.job_id)
        if known is None or row.checkpoints is None:
            return {}
        before, found = known[0].checkpoints or {}, known[1].job.checkpoints
        return {n: found[n] for n, text in row.checkpoints.items() if before.get(n) == text}

    def put(self, row: Row, stored: Stored) -> None:
        """Keep it, in place of what was used longest ago."""
        self.forget(row.job_id)
        (self._ended if stored.job.is_terminal else self._open).put(row, stored)

    def forget(self, job_id: str) -> None:
        """It is deleted."""
        self._open.forget(job_id)
        self._ended.forget(job_id)


class _Rows:
    def __init__(self, characters: int) -> None:
        self._most = characters
        self._characters = 0
        self._known: OrderedDict[str, tuple[Row, Stored]] = OrderedDict()

    def get(self, row: Row) -> Stored | None:
        known = self._known.get(row.job_id)
        if known is None or known[0] != row:
            return None
        self._known.move_to_end(row.job_id)
        return known[1]

    def last(self, job_id: str) -> tuple[Row, Stored] | None:
        return self._known.get(job_id)

    def put(self, row: Row, stored: Stored) -> None:
        self._known[row.job_id] = (row, stored)
        self._characters += _size(row)
        while self._characters > self._most:
            self.forget(next(iter(self._known)))

    def forget(self, job_id: str) -> None:
        known = self._known.pop(job_id, None)
        if known is not None:
            self._characters -= _size(known[0])


def _size(row: Row) -> int:
    parts = sum(len(part or "") for part in row.parts)
    return len(row.doc or "") + parts + sum(map(len, (row.checkpoints or {}).values()))
