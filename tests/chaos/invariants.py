"""What holds whatever is broken: looked up in Redis and in storage themselves, not in the API."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import cast

import redis

from services.contract.api.views import AttemptView, EventView
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened, CheckpointDeleted, Manifest
from services.contract.words.states import ExitReason
from services.controller.adapters.redis import redis_ports
from tests.controller.replays import replay_all

Losses = dict[int, float | None]
_ONCE = ("job.placing", "attempt.ended", "checkpoint.committed", "checkpoint.sealed")


class ViolationError(AssertionError):
    """A promise was broken; the text says which."""


def step_records(server: redis.Redis, job_id: str) -> list[StepRecord]:
    """All step records of a job, in the order in which they were written."""
    entries = cast("list[tuple[str, dict[str, str]]]", server.xrange(redis_keys.job_steps(job_id)))
    return [
        StepRecord.model_validate_json(fields[redis_keys.MESSAGE_FIELD]) for _, fields in entries
    ]


def check_steps(records: Sequence[StepRecord], attempts: Sequence[AttemptView]) -> None:
    """Each attempt goes on strictly behind the commit that it resumed, no step left out or twice.

    The first steps of an attempt that ended long ago may have been trimmed; never the later ones.

    Raises:
        ViolationError: It does not.
    """
    by_fence: dict[int, list[int]] = {}
    newest = 0
    for record in records:
        if record.fence < newest:
            raise ViolationError(f"a step of attempt {record.fence} came after one of {newest}")
        newest = record.fence
        by_fence.setdefault(record.fence, []).append(record.step)
    for attempt in attempts:
        steps = by_fence.get(attempt.fence, [])
        if steps and steps != list(range(steps[0], steps[0] + len(steps))):
            raise ViolationError(f"steps of attempt {attempt.fence} are not one by one: {steps}")
        if steps and attempt.first_step is not None and steps[0] != attempt.first_step:
            raise ViolationError(
                f"attempt {attempt.fence} began with step {attempt.first_step}, "
                f"but its first record is of step {steps[0]}"
            )


def check_attempts(attempts: Sequence[AttemptView]) -> None:
    """Fences grow one by one, and no attempt begins before its predecessor has ended.

    Raises:
        ViolationError: They do not.
    """
    fences = [attempt.fence for attempt in attempts]
    if fences != list(range(1, len(fences) + 1)):
        raise ViolationError(f"attempts are {fences}")
    for before, after in itertools.pairwise(attempts):
        if before.ended_at is None or before.ended_at > after.started_at:
            raise ViolationError(f"attempts {before.fence} and {after.fence} lived at one time")


def check_losses(
    losses: Losses,
    undisturbed: Losses,
    attempts: Sequence[AttemptView],
    last_step: int,
    tolerance: float = 0.0,
) -> None:
    """The losses are those of the undisturbed run, bit for bit or within ``tolerance``.

    A node that was lost takes the last steps of its loss curve with it, those that no beat had
    brought to Redis: they may be missing right before the commit from which the next attempt began.

    Raises:
        ViolationError: They are not.
    """
    wrong = [step for step, loss in losses.items() if _differ(loss, undisturbed[step], tolerance)]
    if wrong:
        raise ViolationError(f"the losses of steps {wrong} are not those of the undisturbed run")
    missing = set(range(1, last_step + 1)) - losses.keys()
    for before, after in itertools.pairwise(attempts):
        step = (after.first_step or 1) - 1
        while before.exit_reason is ExitReason.NODE_LOST and step in missing:
            missing.remove(step)
            step -= 1
    if missing:
        raise ViolationError(f"the losses of steps {sorted(missing)} are missing")


def _differ(loss: float | None, other: float | None, tolerance: float) -> bool:
    if loss is None or other is None:
        return loss is not other
    return abs(loss - other) > tolerance


def check_events(events: Iterable[EventView]) -> None:
    """What happens once is told once.

    Raises:
        ViolationError: It was told twice.
    """
    told = Counter((event.kind, event.message) for event in events if event.kind in _ONCE)
    twice = [what for what, count in told.items() if count > 1]
    if twice:
        raise ViolationError(f"told twice: {twice}")


def check_chain(chain: CommitChain, job_id: str) -> list[Manifest]:
    """Nothing of an overtaken attempt is committed, and what is committed is there, bit for bit.

    Answers the committed checkpoints.

    Raises:
        ViolationError: A zombie wrote into the chain, or a shard is not what was voted for.
    """
    opened = 0
    for record in chain.records():
        if isinstance(record, AttemptOpened):
            if record.fence <= opened:
                raise ViolationError(
                    f"attempt {record.fence} of {job_id} was opened after {opened}"
                )
            opened = record.fence
        elif record.fence != opened:
            raise ViolationError(
                f"attempt {record.fence} of {job_id} wrote while {opened} was open"
            )
    committed = chain.committed()
    for manifest in committed:
        _check_shards(chain, manifest)
    return committed


def check_histories(redis_url: str) -> None:
    """All jobs' histories, decided again by the pure domain, make the records that are kept.

    Raises:
        AssertionError: They make others.
    """

    async def replay() -> None:
        async with redis_ports(redis_url) as ports:
            await replay_all(ports)

    asyncio.run(replay())


def deleted(chain: CommitChain) -> set[str]:
    """The checkpoints that were retired."""
    return {r.checkpoint_id for r in chain.records() if isinstance(r, CheckpointDeleted)}


def _check_shards(chain: CommitChain, manifest: Manifest) -> None:
    folder = chain.shard_folder(manifest.checkpoint_id)
    for shard in manifest.shards:
        try:
            content = (folder / shard.name).read_bytes()
        except OSError as error:
            # Retirement is linked before the files go, so look again whether it was.
            if manifest.checkpoint_id in deleted(chain):
                return
            raise ViolationError(f"{shard.name} of {manifest.checkpoint_id}: {error}") from error
        if sha256(content).hexdigest() != shard.sha256:
            raise ViolationError(f"{shard.name} of {manifest.checkpoint_id} has changed")
