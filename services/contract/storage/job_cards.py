"""A job's card: what storage must know to find a job again when Redis has lost it.

It lies beside the commit chain as ``<root>/<job id>/job.json`` and is written whenever an attempt is
opened, before its first rank, and when it is decided that the job stays or goes on. A job that people
deleted has ``deleted.json`` in its stead.
"""

import secrets
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.contract.jobs.plans import GangPlan
from services.contract.jobs.specs import CarriedSpec
from services.contract.storage.commit_chain import DRAFT_PREFIX
from services.contract.system.durable import make_folders, read_plain, sync_folder, write_new
from services.contract.words.bounds import Moment, Positive, Text
from services.contract.words.ids import CheckpointId, JobId, is_job_id
from services.contract.words.states import ExitReason, JobState

CARD: Final = "job.json"
DELETED: Final = "deleted.json"


class JobCard(BaseModel):
    """A job and its newest attempt, as that attempt was opened.

    ``standing``: QUEUED while the job is meant to run, else the state in which it is to stay, with
    its ``reason`` and ``exit_reason``: a person paused or cancelled it, or it ended. A card that does
    not say stays PAUSED.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Literal[1] = 1
    job_id: JobId
    spec: CarriedSpec
    owner: Annotated[str, Field(max_length=200)]
    created_ms: Moment
    fence: Positive
    plan: GangPlan
    resume_from: CheckpointId | None = None
    standing: JobState = JobState.PAUSED
    reason: Text = ""
    exit_reason: ExitReason | None = None


def write_card(root: Path, card: JobCard) -> None:
    """Writes the card durably, in the place of an older one.

    Raises:
        OSError: The storage refuses.
    """
    folder = root / card.job_id
    make_folders(folder, root)
    draft = folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
    try:
        write_new(draft, card.model_dump_json(indent=1).encode())
        draft.replace(folder / CARD)
    finally:
        draft.unlink(missing_ok=True)
    (folder / DELETED).unlink(missing_ok=True)
    sync_folder(folder)


def read_card(root: Path, job_id: str) -> JobCard | None:
    """The card of a job that nobody deleted; None where there is none that can be read."""
    try:
        card = JobCard.model_validate_json(read_plain(root / job_id / CARD))
    except (OSError, ValidationError):
        return None
    return card if card.job_id == job_id else None


def put_card_away(root: Path, job_id: str) -> bool:
    """Marks a job as deleted: it is not found again. Answers whether it was not marked yet.

    Raises:
        OSError: The storage refuses.
    """
    folder = root / job_id
    try:
        (folder / CARD).replace(folder / DELETED)
    except FileNotFoundError:
        return False
    sync_folder(folder)
    return True


def jobs_in(root: Path) -> list[str]:
    """The ids of all jobs of which a storage root holds anything, oldest first.

    What else lies there is passed over: a rank may have made a folder whose name is no text at all.

    Raises:
        OSError: The storage refuses.
    """
    if not root.is_dir():
        return []
    names = root.glob("job_*")
    return sorted(path.name for path in names if is_job_id(path.name) and path.is_dir())
