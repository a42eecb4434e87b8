"""Checkpoints as objects."""

from collections.abc import Sequence
from typing import Self

from meshloom.client.asynchronous.rest import AsyncRestClient
from services.contract.api.views import CheckpointView
from services.contract.words.states import CheckpointState


class AsyncCheckpoint:
    """One checkpoint, as it was when it was last read.

    Attributes:
        view: All that the API tells of it.
    """

    def __init__(self, rest: AsyncRestClient, view: CheckpointView) -> None:
        self._rest = rest
        self.view = view

    def __repr__(self) -> str:
        return f"<checkpoint {self.id} of step {self.step}, {self.state}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.view.id

    @property
    def job_id(self) -> str:
        """The id of its job."""
        return self.view.job_id

    @property
    def step(self) -> int:
        """After which step it was taken."""
        return self.view.step

    @property
    def state(self) -> CheckpointState:
        """Where it stood; only COMMITTED ones are resumed from."""
        return self.view.state

    async def refresh(self) -> Self:
        """Read it again."""
        self.view = await self._rest.checkpoint(self.id)
        return self

    async def verify(self) -> Self:
        """Have a node read every file of it; ``refresh`` until ``view.checked_at`` is later."""
        self.view = await self._rest.verify(self.id)
        return self

    async def pin(self) -> Self:
        """Keep it whatever retention says."""
        self.view = await self._rest.pin(self.id)
        return self

    async def unpin(self) -> Self:
        """Leave it to retention again."""
        self.view = await self._rest.pin(self.id, keep=False)
        return self

    async def export(self) -> Self:
        """Have a node put its model together as safetensors files."""
        self.view = await self._rest.export(self.id)
        return self

    async def delete(self) -> Self:
        """Delete it, if nothing needs it."""
        self.view = await self._rest.remove_checkpoint(self.id)
        return self


class AsyncCheckpoints:
    """The checkpoints of all jobs: ``client.checkpoints``."""

    def __init__(self, rest: AsyncRestClient) -> None:
        self._rest = rest

    async def get(self, checkpoint_id: str) -> AsyncCheckpoint:
        """One checkpoint."""
        return AsyncCheckpoint(self._rest, await self._rest.checkpoint(checkpoint_id))

    async def of_job(self, job_id: str) -> Sequence[AsyncCheckpoint]:
        """A job's checkpoints, newest first."""
        found = await self._rest.checkpoints(job_id)
        return [AsyncCheckpoint(self._rest, view) for view in found.items]
