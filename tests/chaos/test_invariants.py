"""The checks of the chaos program see what they are there to see."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from services.contract.api.views import AttemptView, EventView
from services.contract.messages.telemetry import StepRecord
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened, Manifest, ShardFile
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import ExitReason
from tests.chaos.invariants import (
    ViolationError,
    check_attempts,
    check_chain,
    check_events,
    check_losses,
    check_steps,
)

JOB = new_job_id(1_700_000_000_000, bytes(10))
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, fence: int = 1) -> StepRecord:
    return StepRecord(step=number, fence=fence, loss=1.0, tokens_per_s=1.0, step_time_s=1.0)


def attempt(
    fence: int, begin: int, end: int | None, first: int = 1, reason: ExitReason | None = None
) -> AttemptView:
    return AttemptView(
        fence=fence,
        world_size=2,
        node_ids=("loom-1",),
        started_at=BEGAN + timedelta(seconds=begin),
        ended_at=None if end is None else BEGAN + timedelta(seconds=end),
        first_step=first,
        exit_reason=reason,
    )


TWO = [attempt(1, 0, 5), attempt(2, 6, None, first=3)]


def test_steps_that_go_on_from_the_commit_are_well() -> None:
    check_steps([step(1), step(2), step(3), step(3, 2), step(4, 2)], TWO)


@pytest.mark.parametrize(
    "records",
    [
        [step(1), step(1)],
        [step(1), step(3)],
        [step(1), step(3, 2), step(2)],
        [step(1), step(4, 2)],
    ],
    ids=["twice", "left out", "of an overtaken attempt", "beyond the commit"],
)
def test_steps_told_wrongly_are_seen(records: list[StepRecord]) -> None:
    with pytest.raises(ViolationError):
        check_steps(records, TWO)


def test_two_attempts_at_one_time_are_seen() -> None:
    check_attempts(TWO)
    with pytest.raises(ViolationError, match="lived at one time"):
        check_attempts([attempt(1, 0, 7), attempt(2, 6, None)])
    with pytest.raises(ViolationError, match="lived at one time"):
        check_attempts([attempt(1, 0, None), attempt(2, 6, None)])
    with pytest.raises(ViolationError, match="attempts are"):
        check_attempts([attempt(2, 0, 7)])


def test_an_event_told_twice_is_seen() -> None:
    told = [
        EventView(
            id=str(place), at=BEGAN, job_id=JOB, kind="job.placing", message="attempt 1", actor="x"
        )
        for place in range(2)
    ]
    check_events(told[:1])
    with pytest.raises(ViolationError, match="told twice"):
        check_events(told)


def test_a_loss_that_differs_or_is_missing_is_seen() -> None:
    undisturbed: dict[int, float | None] = {1: 3.0, 2: 2.0, 3: 1.0}
    check_losses(dict(undisturbed), undisturbed, TWO, 3)
    with pytest.raises(ViolationError, match="not those of the undisturbed"):
        check_losses({**undisturbed, 2: 2.5}, undisturbed, TWO, 3)
    gap: dict[int, float | None] = {1: 3.0, 3: 1.0}
    with pytest.raises(ViolationError, match=r"\[2\] are missing"):
        check_losses(gap, undisturbed, TWO, 3)
    lost = [attempt(1, 0, 5, reason=ExitReason.NODE_LOST), TWO[1]]
    check_losses(gap, undisturbed, lost, 3)


def test_a_zombies_commit_and_a_changed_shard_are_seen(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(AttemptOpened(job_id=JOB, fence=1))
    manifest = committed(chain, 1)
    assert check_chain(chain, JOB) == [manifest]
    chain.append(AttemptOpened(job_id=JOB, fence=2))
    (tmp_path / JOB / "chain" / "00000004.json").write_text(
        written(chain, 1, step=20).model_dump_json()
    )
    with pytest.raises(ViolationError, match=r"attempt 1 of .* wrote while 2 was open"):
        check_chain(chain, JOB)
    (tmp_path / JOB / "chain" / "00000004.json").unlink()
    (chain.shard_folder(manifest.checkpoint_id) / "rank-0").write_bytes(b"other")
    with pytest.raises(ViolationError, match="has changed"):
        check_chain(chain, JOB)


def committed(chain: CommitChain, fence: int) -> Manifest:
    manifest = written(chain, fence, step=10)
    chain.append(manifest)
    return manifest


def written(chain: CommitChain, fence: int, step: int) -> Manifest:
    name = checkpoint_id(JOB, step, fence)
    folder = chain.shard_folder(name)
    folder.mkdir(parents=True)
    (folder / "rank-0").write_bytes(b"whole")
    shard = ShardFile(rank=0, name="rank-0", bytes=5, sha256=sha256(b"whole").hexdigest())
    return Manifest(
        job_id=JOB, checkpoint_id=name, fence=fence, step=step, world_size=1, shards=(shard,)
    )
