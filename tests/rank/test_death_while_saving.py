"""A rank dies at each point of a save: what was committed loads, and training goes on from there.

``tests/e2e/test_checkpoint_faults.py`` has it die at two of them below a controller and an agent.
"""

import hashlib
import os
import signal
from collections.abc import Callable

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankSeat, RankVote
from services.contract.storage.commit_chain import CommitChain
from services.worker.rank.process.seat import AgentPipe
from tests.rank.gang import JOB, Ranks, Trained

pytestmark = pytest.mark.ranks

POINTS = (
    "before_write",
    "within_write",
    "before_sync",
    "after_sync",
    "before_folder_sync",
    "before_vote",
    "after_vote",
)
SAVED, DYING = 2, 4
TRAINER = "tests.rank.test_death_while_saving:train_below_armed_points"


def train_below_armed_points(
    *, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None
) -> None:
    """In a rank: as the trainer does, with points that files beside its log arm."""
    faults = {"LOOM_FAULTS": seat.log_folder, "LOOM_FAULTS_STEP": str(DYING)}
    os.environ.update(faults)  # noqa: TID251 before what looks at it is imported
    from tests.e2e.faults import faulty_trainer  # noqa: PLC0415 as above

    faulty_trainer.train(seat=seat, pipe=pipe, board=board, listen_fd=listen_fd)


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_dies_while_it_saves_leaves_what_is_committed_whole_and_no_loss_differs(
    trained: Trained, ranks: Ranks, spec: Callable[..., JobSpec], point: str
) -> None:
    job = spec(checkpoint={"every_steps": SAVED})
    whole = trained.of(job).losses()
    (ranks.root / point).touch()
    first = ranks.start(job, trainer=TRAINER)
    assert first.ended()[1] == -signal.SIGKILL
    assert not (ranks.root / point).exists(), "the point was never reached"
    told = [{vote.step for vote in first.of_kind(rank, RankVote)} for rank in (0, 1)]
    assert told[1] == ({SAVED, DYING} if point == "after_vote" else {SAVED})
    # Rank 0 may be ended by the loss of its peer before it has voted, too.
    step = max(told[0] & told[1])
    source = first.committed(step)

    again = ranks.start(job, fence=2, resume_from=source.checkpoint_id, trainer=TRAINER)
    assert again.succeeded().losses() == trained.of(job).losses_after(step)
    assert first.losses().items() <= whole.items()
    for saved in {DYING, 6} - {step}:
        again.committed(saved)
    chain = CommitChain(ranks.root, JOB)
    for manifest in chain.committed():
        for shard in manifest.shards:
            content = (chain.shard_folder(manifest.checkpoint_id) / shard.name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256
