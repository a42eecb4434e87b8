"""How an agent that is told to stop empties its node first: gangs move elsewhere, and no commit is left undone."""

import asyncio
import contextlib
from collections.abc import Callable

from services.contract.messages.facts import (
    CheckpointLinked,
    CheckpointLost,
    CheckpointVoted,
    Fact,
    GangLaunched,
)
from services.contract.words.ids import step_and_fence
from services.worker.agent.session import Session
from services.worker.agent.supervisor import Supervisor


class Commits:
    """The newest checkpoint of each job that only this agent can commit.

    Ranks exit once their vote is cast, and the agent of rank 0 links the manifest when the controller orders
    it. Were it gone by then, the checkpoint would be lost, and with it the steps that it was taken to save.

    Args:
        tell: Takes what is told to the controller.
    """

    def __init__(self, tell: Callable[[Fact], None]) -> None:
        self._forward = tell
        self._awaited: dict[str, str] = {}
        self._settled = asyncio.Event()

    def tell(self, fact: Fact) -> None:
        """Hand a fact on, and note what it says of a commit."""
        self._forward(fact)
        match fact:
            case CheckpointVoted() if fact.shard.rank == 0:
                self._awaited[fact.job_id] = fact.checkpoint_id
            case GangLaunched():
                awaited = self._awaited.get(fact.job_id)
                # Nothing of an earlier attempt is committed any more. That of this one is: it says so again when it is asked.
                if awaited is not None and step_and_fence(awaited)[1] < fact.fence:
                    self._settle(awaited)
            case CheckpointLinked():
                self._settle(fact.manifest.checkpoint_id)
            case CheckpointLost():
                self._settle(fact.checkpoint_id)

    async def settled(self) -> None:
        """Return once none is awaited."""
        while self._awaited:
            self._settled.clear()
            await self._settled.wait()

    def _settle(self, checkpoint_id: str) -> None:
        self._awaited = {k: name for k, name in self._awaited.items() if name != checkpoint_id}
        self._settled.set()


async def empty_node(
    session: Session, supervisor: Supervisor, commits: Commits, grace_s: float
) -> bool:
    """Have gangs write a checkpoint and move elsewhere; return once they have, or the grace is over.

    Args:
        session: Tells the controller.
        supervisor: Of the gangs; it goes on to carry out commands meanwhile.
        commits: What is awaited of this agent.
        grace_s: Seconds; 0: gangs are not asked to move.

    Returns:
        Whether there were any.
    """
    if supervisor.is_idle:
        return False
    if grace_s:
        session.set_out(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await supervisor.emptied()
                await commits.settled()
    return True
