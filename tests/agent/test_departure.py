"""An agent that is to leave stays until the last checkpoint of its gangs is committed, or will not be."""

import asyncio

import pytest

from services.contract.messages.facts import (
    CheckpointLinked,
    CheckpointLost,
    CheckpointVoted,
    Fact,
    GangLaunched,
)
from services.contract.words.ids import checkpoint_id
from services.worker.agent.departure import Commits
from tests.agent.conftest import JOB, NODE

OF_RANK = {"job_id": JOB, "node_id": NODE, "fence": 1}


def voted(rank: int, step: int) -> CheckpointVoted:
    shard = {"rank": rank, "name": f"rank-{rank}.bin", "bytes": 7, "sha256": "ab" * 32}
    name = checkpoint_id(JOB, step, 1)
    return CheckpointVoted.model_validate(
        {**OF_RANK, "checkpoint_id": name, "step": step, "shard": shard}
    )


def linked(step: int) -> CheckpointLinked:
    manifest = {
        "job_id": JOB,
        "checkpoint_id": checkpoint_id(JOB, step, 1),
        "fence": 1,
        "step": step,
        "world_size": 1,
        "shards": [voted(0, step).shard.model_dump()],
    }
    return CheckpointLinked.model_validate({**OF_RANK, "number": 1, "manifest": manifest})


def lost(step: int) -> CheckpointLost:
    fields = {**OF_RANK, "checkpoint_id": checkpoint_id(JOB, step, 1), "reason": "disk full"}
    return CheckpointLost.model_validate(fields)


def launched(fence: int) -> GangLaunched:
    return GangLaunched(job_id=JOB, node_id=NODE, fence=fence, pids={0: 100})


@pytest.mark.parametrize(
    ("facts", "is_awaited"),
    [
        ([], False),
        ([voted(0, 10)], True),
        ([voted(1, 10)], False),  # the agent of rank 0 commits
        ([voted(0, 10), linked(10)], False),
        ([voted(0, 10), lost(10)], False),
        ([voted(0, 10), voted(0, 20), linked(20)], False),  # the earlier one was given up
        ([voted(0, 10), voted(0, 20), linked(10)], True),
        ([voted(0, 10), launched(2)], False),  # the first attempt ended before all had voted
        ([launched(1), voted(0, 10)], True),
        ([launched(1), voted(0, 10), launched(1)], True),  # its launch was answered again
    ],
)
def test_only_the_newest_checkpoint_that_this_agent_commits_is_awaited(
    facts: list[Fact], *, is_awaited: bool
) -> None:
    async def waits() -> bool:
        told: list[Fact] = []
        commits = Commits(told.append)
        for fact in facts:
            commits.tell(fact)
        assert told == facts
        waiting = asyncio.create_task(commits.settled())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_waiting = not waiting.done()
        commits.tell(linked(10))
        commits.tell(linked(20))
        await waiting
        return is_waiting

    assert asyncio.run(waits()) == is_awaited
