"""Ways to save the state of a run: this project's, and those of ``torch.distributed.checkpoint``."""

from concurrent.futures import Future
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsdp_core.checkpoint import model_state, optimizer_state
from services.contract.messages.rank_pipe import (
    RankCheckpointFailed,
    RankMessage,
    RankSeat,
    RankVote,
)
from services.worker.rank.checkpoints.state import capture
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.loop.run import Run


class Way(Protocol):
    """A way to save the state of a run."""

    def save(self, step: int) -> None:
        """Returns once the next forward and backward pass may begin."""
        ...

    def release(self) -> None:
        """Returns once the next update may begin."""
        ...

    def is_durable(self) -> bool:
        """Whether this rank's bytes are, or were lost."""
        ...

    def finish(self) -> None:
        """Waits until they are."""
        ...


class Ours:
    """This project's, written while training waits (``sync``) or beside it (``async``)."""

    def __init__(self, run: Run, seat: RankSeat, mode: Literal["sync", "async"]) -> None:
        self._run = run
        self._told: list[RankMessage] = []
        self._step = 0
        self._writer = CheckpointWriter(
            seat, self._told.append, mode, data_digest="", resumed_step=0
        )

    def save(self, step: int) -> None:
        """As the trainer does."""
        self._told.clear()
        self._step = step
        self._writer.save(capture(self._run.trained, step, None))

    def release(self) -> None:
        """As the trainer does."""
        self._writer.release()

    def is_durable(self) -> bool:
        """Whether the vote was cast."""
        return any(isinstance(m, RankVote | RankCheckpointFailed) for m in self._told)

    def finish(self) -> None:
        """As at the end of a run: what could not be written is an error."""
        self._writer.finish(self._step)


class DCPSave:
    """``dcp.save``, whose files are synced too."""

    def __init__(self, run: Run, folder: Path, group: dist.ProcessGroup) -> None:
        self._run = run
        self._folder = folder
        self._group = group

    def save(self, step: int) -> None:
        """Returns when all is written."""
        folder = self._folder / "dcp" / str(step)
        dcp_save(state_of(self._run), checkpoint_id=folder, process_group=self._group)

    def release(self) -> None:
        """Nothing is left to wait for."""

    def is_durable(self) -> bool:
        """It is."""
        return True

    def finish(self) -> None:
        """Nothing is left to wait for."""


class DCPAsync:
    """``dcp.async_save``, as it comes or with a stager."""

    def __init__(
        self, run: Run, folder: Path, group: dist.ProcessGroup, stager: DefaultStager | None
    ) -> None:
        self._run = run
        self._folder = folder
        self._group = group
        self._stager = stager
        self._staged: list[Future[None]] = []
        self._written: list[Future[None]] = []

    def save(self, step: int) -> None:
        """Returns when all is staged, or with a stager at once."""
        pending = async_save(
            state_of(self._run),
            checkpoint_id=self._folder / "dcp" / str(step),
            process_group=self._group,
            async_stager=self._stager,
        )
        if isinstance(pending, AsyncSaveResponse):
            self._staged, self._written = [pending.staging_completion], [pending.upload_completion]
        else:
            self._written = [pending]

    def release(self) -> None:
        """Waits for the stager."""
        for future in self._staged:
            future.result()

    def is_durable(self) -> bool:
        """Whether its thread is done."""
        return all(future.done() for future in self._written)

    def finish(self) -> None:
        """Waits for its thread; what could not be written is an error."""
        for future in self._written:
            future.result()


def staging_in_a_thread() -> DefaultStager:
    """DCP's stager as far as it goes without an accelerator; with one, as it comes."""
    has_device = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=has_device,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=has_device,
        )
    )


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """What all ways save; sharded."""
    return {**model_state(run.model), **optimizer_state(run.model, run.optimizers.named(None)[0])}
