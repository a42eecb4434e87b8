"""What ranks do when the disk of checkpoints is really full."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankFinished,
    RankReady,
    RankVote,
)
from tests.disk import small_disk
from tests.rank.gang import JOB, Ranks

FULL = "the checkpoint disk of here is full"


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("is_paused", [False, True], ids=["at its end", "before a pause"])
def test_ranks_write_the_last_checkpoint_again_until_there_is_room(
    ranks: Ranks, spec: Callable[..., JobSpec], tmp_path: Path, mode: str, *, is_paused: bool
) -> None:
    steps = 1_000_000 if is_paused else 4
    every = 0 if is_paused else 3
    job = spec(train={"steps": steps}, checkpoint={"every_steps": every, "mode": mode})
    with small_disk(tmp_path / "disk") as disk:
        (tmp_path / JOB).symlink_to(disk.path)
        disk.fill()
        attempt = ranks.start(job)
        if is_paused:
            attempt.until(lambda: bool(attempt.of_kind(0, RankReady)))
            attempt.order(0, checkpoint=True, stop=True)
        attempt.until(
            lambda: all(len(attempt.of_kind(rank, RankCheckpointWaits)) > 1 for rank in (0, 1))
        )
        told = attempt.of_kind(0, RankCheckpointWaits)
        assert {message.condition for message in told} == {FULL}
        assert not attempt.of_kind(0, RankFinished)
        # One that another follows is given up, as ever.
        lost = attempt.of_kind(0, RankCheckpointFailed)
        assert ["No space left" in message.reason for message in lost] == [True] * (not is_paused)

        disk.free()
        attempt.succeeded()
        manifest = attempt.committed(told[0].step)
    assert manifest.step == steps or is_paused
    assert [vote.step for vote in attempt.of_kind(1, RankVote)] == [manifest.step]
