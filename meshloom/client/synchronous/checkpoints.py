"""Checkpoints as objects."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from meshloom.client.distributed_checkpoint import write_distributed_checkpoint
from meshloom.client.downloads import ExportFormat, PartialFile, files_of, prepared_folder
from meshloom.client.errors import DownloadError
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
        """Have a node put its model together as safetensors files, in the storage of the nodes."""
        self.view = self._rest.export(self.id)
        return self

    def download(
        self,
        folder: Path | str,
        *,
        format: ExportFormat = "safetensors",  # noqa: A002 what it is called everywhere
        poll_s: float = 0.5,
    ) -> Sequence[Path]:
        """Download its model into a folder; answers the files, or for ``dcp`` the folder.

        It is exported first, unless it has been. A download that broke off goes on where it stopped,
        also in another process; files that are there are not downloaded again. Each file has its name
        once its SHA-256 is right.

        Args:
            folder: Is made if it is not there.
            format: ``safetensors``: the weights; ``hf``: with ``config.json`` and all else that
                ``from_pretrained`` reads; ``dcp``: as ``torch.distributed.checkpoint`` writes them,
                converted here.
            poll_s: Seconds between two looks at the export.

        Raises:
            DownloadError: The export failed, or has no such format, or a file is not what it should be.
        """
        self._exported(poll_s)
        chosen = files_of(self._rest.export_files(self.id), format)
        target = prepared_folder(folder)
        place = prepared_folder(target / ".safetensors") if format == "dcp" else target
        found: list[Path] = []
        for file in chosen:
            partial = PartialFile(place, file)
            if not partial.is_there:
                self._rest.download(self.id, file.name, partial)
                partial.finish()
            found.append(place / file.name)
        if format != "dcp":
            return found
        write_distributed_checkpoint(found, target)
        for path in found:
            path.unlink()
        place.rmdir()
        return [target]

    def _exported(self, poll_s: float) -> None:
        self.refresh()
        if self.view.export is None or self.view.export.state == "FAILED":
            self.export()
        while self.view.export is None or self.view.export.state == "RUNNING":
            time.sleep(poll_s)  # noqa: TID251 a poll over REST has nothing else to wait on
            self.refresh()
        if self.view.export.state == "FAILED":
            raise DownloadError(f"the export of {self.id} failed: {self.view.export.reason}")

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
