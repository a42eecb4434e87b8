"""Checkpoints as objects."""

from collections.abc import Sequence
from typing import Self

from meshloom.client.synchronous.rest import RestClient
from services.contract.api.views import CheckpointView
from services.contract.words.states import CheckpointState


class Checkpoint:
    """One checkpoint, as it was when it was last read.

    Attributes:
        view: All that the API tells of it.
    """

    def __init__(self, rest: RestClient, view: CheckpointView) -> None:
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

    def refresh(self) -> Self:
        """Read it again."""
        self.view = self._rest.checkpoint(self.id)
        return self

    def verify(self) -> Self:
        """Have a node read every file of it; ``refresh`` until ``view.checked_at`` is later."""
        self.view = self._rest.verify(self.id)
        return self

    def pin(self) -> Self:
        """Keep it whatever retention says."""
        self.view = self._rest.pin(self.id)
        return self

    def unpin(self) -> Self:
        """Leave it to retention again."""
        self.view = self._rest.pin(self.id, keep=False)
        return self

    def export(self) -> Self:
        """Have a node put its model together as safetensors files."""
        self.view = self._rest.export(self.id)
        return self

    def delete(self) -> Self:
        """Delete it, if nothing needs it."""
        self.view = self._rest.remove_checkpoint(self.id)
        return self


class Checkpoints:
    """The checkpoints of all jobs: ``client.checkpoints``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def get(self, checkpoint_id: str) -> Checkpoint:
        """One checkpoint."""
        return Checkpoint(self._rest, self._rest.checkpoint(checkpoint_id))

    def of_job(self, job_id: str) -> Sequence[Checkpoint]:
        """A job's checkpoints, newest first."""
        found = self._rest.checkpoints(job_id)
        return [Checkpoint(self._rest, view) for view in found.items]
