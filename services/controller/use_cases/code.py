"""Uploaded code: judged and kept, named by jobs and plans, forgotten when nothing names it.

An archive is kept while any job that is kept names it, and for a day after it was last uploaded, or
named by a plan, a submission or a clone. A job's node keeps another copy beside its checkpoints.
"""

import asyncio
from typing import Final, NamedTuple

import structlog

from services.contract.api.views import CodeView
from services.contract.jobs.code_archives import CodeArchiveError, digest_of, examine
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import rest_since
from services.contract.words.problems import Fault
from services.controller.domain.access.code import CodeLimits, UploadedCode
from services.controller.domain.errors import (
    InvalidRequestError,
    NotFoundError,
    StateConflictError,
)
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Place
from services.controller.use_cases.present import moment

# To read one with a spec of 64 KiB may take a twentieth of a second.
_CHUNK: Final = 10
_log = structlog.get_logger()


class Archive(NamedTuple):
    """What came, under which name, and who sent it."""

    digest: str
    body: bytes
    subject: str


async def keep_code(
    ports: Ports, came: Archive, limits: CodeLimits, hands: asyncio.Semaphore
) -> tuple[CodeView, bool]:
    """Judge an archive and keep it; answers whether it was not there before.

    Args:
        ports: The world.
        came: The archive.
        limits: What room there is.
        hands: How many archives are judged at a time, beside the event loop.

    Raises:
        InvalidRequestError: It has another digest, or is none that is taken.
        StateConflictError: There is no room for it.
    """
    async with hands:
        found = await asyncio.to_thread(digest_of, came.body)
        if found != came.digest:
            raise _refusal(
                f"these {len(came.body)} bytes have the digest {found}, not {came.digest}; send "
                "the archive "
                "under its own digest",
                "digest_mismatch",
            )
        known = await ports.codes.get(came.digest)
        if known is not None and await ports.codes.use(came.digest):
            return code_view(known), False
        try:
            contents = await asyncio.to_thread(examine, came.body)
        except CodeArchiveError as error:
            raise _refusal(str(error), "bad_archive") from error
    code = UploadedCode(
        digest=came.digest,
        bytes=len(came.body),
        files=contents.files,
        unpacked_bytes=contents.unpacked_bytes,
        uploaded_by=came.subject,
        uploaded_ms=await ports.clock.now_ms(),
    )
    kept = await ports.codes.keep(code, came.body, limits)
    if kept in {"full", "share"}:
        whose = "all" if kept == "full" else f"{came.subject}'s"
        room = limits.store_bytes if kept == "full" else limits.share_bytes
        raise StateConflictError(
            f"the code store is full: {whose} uploaded code may take {room >> 20} MiB "
            "(MESHLOOM_MAX_CODE_STORE_MIB); delete ended jobs and retry a day later, or raise the "
            "limit",
            code="code_store_full",
        )
    _log.info("code_kept", digest=code.digest, bytes=code.bytes, files=code.files, kept=kept)
    return code_view(code), kept == "new"


async def get_code(ports: Ports, digest: str) -> CodeView:
    """What is known of an archive.

    Raises:
        NotFoundError: It is not here.
    """
    code = await ports.codes.get(digest)
    if code is None:
        raise NotFoundError(f"there is no uploaded code {digest}")
    return code_view(code)


async def code_faults(ports: Ports, spec: JobSpec, allowed: EntryPoints) -> list[Fault]:
    """Whether the code that a spec may name is missing; if not, it is kept for a day from now."""
    if spec.code is None or not allowed.take_uploads or await ports.codes.use(spec.code):
        return []
    detail = (
        f"code: {spec.code} is not uploaded: upload it (`meshloom submit FILE --code DIR`, or PUT "
        "/v1/code/{digest}); an archive that no job names is kept for a day"
    )
    return [Fault(pointer="/code", detail=detail, code="code_unknown")]


async def forget_unused(ports: Ports, epoch: int) -> list[str]:
    """Remove the archives that nothing names; answers which.

    Raises:
        DeposedError: ``epoch`` is over.
    """
    before_ms = await ports.clock.now_ms() - keys.CODE_KEPT_S * 1000
    unused = await ports.codes.unused(before_ms)
    if not unused:
        return []
    needed = await _needed(ports)
    if any(map(_is_of_a_job, ports.unreadable())):  # it may name any of them
        return []
    gone = []
    for digest in unused:
        if digest in needed:
            await ports.codes.use(digest)
        elif await ports.codes.forget(digest, before_ms, epoch):
            gone.append(digest)
            _log.info("code_forgotten", digest=digest)
    return gone


def _is_of_a_job(name: str) -> bool:
    """Whether a key is that of a job's record, and not of what is kept beside it."""
    job_id = name.removeprefix(keys.job(""))
    return job_id != name and ":" not in job_id


async def _needed(ports: Ports) -> set[str]:
    needed: set[str] = set()
    place: Place | None = None
    clock = asyncio.get_running_loop().time
    began = clock()
    while chunk := await ports.jobs.page(place, _CHUNK):
        for job in (stored.job for stored in chunk):
            specs = [job.spec] if job.asked is None else [job.spec, job.asked]
            needed.update(spec.code for spec in specs if spec.code is not None)
        place = Place(chunk[-1].job.created_ms, chunk[-1].job.id)
        await rest_since(began)
        began = clock()
    return needed


def code_view(code: UploadedCode) -> CodeView:
    """An archive as the REST API shows it."""
    return CodeView(
        digest=code.digest,
        bytes=code.bytes,
        files=code.files,
        unpacked_bytes=code.unpacked_bytes,
        uploaded_by=code.uploaded_by,
        uploaded_at=moment(code.uploaded_ms),
    )


def _refusal(detail: str, code: str) -> InvalidRequestError:
    return InvalidRequestError([Fault(pointer="", detail=detail, code=code)])
