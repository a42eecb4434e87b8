"""Identifiers that sort by the time at which they were made.

An id is ``<kind>_<ULID>``: 48 bits of milliseconds and 80 random bits in Crockford's base 32,
lower case (https://github.com/ulid/spec). The time only orders; nothing is decided by it.
"""

import re
from typing import Annotated, Final

from pydantic import StringConstraints

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ULID: Final = f"[0-7][{_ALPHABET}]{{25}}"
_TIME_BITS: Final = 48
_RANDOM_BYTES: Final = 10

JobId = Annotated[str, StringConstraints(pattern=rf"^job_{_ULID}$")]
CheckpointId = Annotated[
    str, StringConstraints(pattern=rf"^ckpt_{_ULID}-s[0-9]{{9}}-a[0-9]{{4,10}}$")
]
TokenId = Annotated[str, StringConstraints(pattern=rf"^tok_{_ULID}$")]
PlanId = Annotated[str, StringConstraints(pattern=rf"^plan_{_ULID}$")]
WebhookId = Annotated[str, StringConstraints(pattern=rf"^webhook_{_ULID}$")]
TraceId = Annotated[str, StringConstraints(pattern=rf"^trace_{_ULID}$")]
ProbeId = Annotated[str, StringConstraints(pattern=r"^probe_[0-9a-f]{32}$")]
NodeId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]


_IS_JOB_ID: Final = re.compile(rf"job_{_ULID}")


def is_job_id(text: str) -> bool:
    """Whether it has the form of a job's id."""
    return _IS_JOB_ID.fullmatch(text) is not None


def new_job_id(now_ms: int, randomness: bytes) -> str:
    """A job id for the moment ``now_ms`` (Unix milliseconds) from 10 random bytes."""
    return f"job_{_ulid(now_ms, randomness)}"


def new_plan_id(now_ms: int, randomness: bytes) -> str:
    """A plan id for the moment ``now_ms`` (Unix milliseconds) from 10 random bytes."""
    return f"plan_{_ulid(now_ms, randomness)}"


def new_token_id(now_ms: int, randomness: bytes) -> str:
    """A token id for the moment ``now_ms`` (Unix milliseconds) from 10 random bytes."""
    return f"tok_{_ulid(now_ms, randomness)}"


def new_webhook_id(now_ms: int, randomness: bytes) -> str:
    """A webhook id for the moment ``now_ms`` (Unix milliseconds) from 10 random bytes."""
    return f"webhook_{_ulid(now_ms, randomness)}"


def new_trace_id(now_ms: int, randomness: bytes) -> str:
    """A trace id for the moment ``now_ms`` (Unix milliseconds) from 10 random bytes."""
    return f"trace_{_ulid(now_ms, randomness)}"


def new_reservation_id(now_ms: int, randomness: bytes) -> str:
    """A name for nodes of a pool, for the moment ``now_ms`` (Unix ms) from 10 random bytes.

    Without underscores, for it names objects of other systems too.
    """
    return f"nodes-{_ulid(now_ms, randomness)}"


def checkpoint_id(job_id: str, step: int, fence: int) -> str:
    """The one name of the checkpoint that attempt ``fence`` of a job takes after ``step``.

    Every rank derives it without being told, so that no message is needed to agree on it.
    Ids of one job sort by step, then by attempt.
    """
    return f"ckpt_{job_id.removeprefix('job_')}-s{step:09d}-a{fence:04d}"


def job_of_checkpoint(checkpoint: str) -> str:
    """The id of the job to which a checkpoint id belongs."""
    return f"job_{checkpoint.removeprefix('ckpt_').split('-', maxsplit=1)[0]}"


def attempt_of_checkpoint(checkpoint: str) -> tuple[str, int]:
    """The job and the number of the attempt that takes the checkpoint of this id."""
    return job_of_checkpoint(checkpoint), step_and_fence(checkpoint)[1]


def step_and_fence(checkpoint: str) -> tuple[int, int]:
    """The step and the attempt that a checkpoint's id names."""
    _, step, fence = checkpoint.rsplit("-", 2)
    return int(step.removeprefix("s")), int(fence.removeprefix("a"))


def _ulid(now_ms: int, randomness: bytes) -> str:
    if len(randomness) != _RANDOM_BYTES or not 0 <= now_ms < 1 << _TIME_BITS:
        raise ValueError("a ULID takes 48 bits of milliseconds and 10 random bytes")
    number = (now_ms << 80) | int.from_bytes(randomness, "big")
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))
