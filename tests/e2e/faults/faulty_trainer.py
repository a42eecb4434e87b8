"""The real trainer, with points at which rank 1 dies while it saves a step; no pickle is loaded."""

import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankMessage, RankSeat, RankVote
from services.contract.storage.manifests import ShardFile
from services.worker.rank.checkpoints import shard_file
from services.worker.rank.checkpoints.state import TrainedParts
from services.worker.rank.loop import trainer
from services.worker.rank.process.seat import AgentPipe
from tests.e2e.faults.fault_points import STEP, is_armed, strike

# What is replaced in them is none of their business.
_os: Any = os
_trainer: Any = trainer
_shard_file: Any = shard_file
SAVES = f"-s{STEP:09d}-"
DISK_BYTES = 1 << 16


def train(*, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None) -> None:
    """As the trainer does."""
    _trainer.resume = without_pickles(_trainer.resume)
    if seat.rank == 1:
        Saving(pipe).install()
    trainer.train(seat=seat, pipe=pipe, board=board, listen_fd=listen_fd)


def without_pickles(
    resume: Callable[[TrainedParts, RankSeat, Callable[[RankMessage], None]], int],
) -> Callable[[TrainedParts, RankSeat, Callable[[RankMessage], None]], int]:
    """``resume``, in which nothing may be unpickled: the interpreter's own audit sees to it."""
    resuming = False

    def refuse(event: str, _: tuple[object, ...]) -> None:
        if resuming and event in {"pickle.find_class", "marshal.loads"}:
            raise RuntimeError("something was unpickled while a checkpoint was loaded")

    def guarded(run: TrainedParts, seat: RankSeat, send: Callable[[RankMessage], None]) -> int:
        nonlocal resuming
        resuming = True
        try:
            try:
                pickle.loads(pickle.dumps(Path()))  # noqa: S301 that it is refused is the point
            except RuntimeError:
                return resume(run, seat, send)
            raise AssertionError("the audit is deaf")
        finally:
            resuming = False

    sys.addaudithook(refuse)
    return guarded


class Saving:
    """The steps of a save, each with its points."""

    def __init__(self, pipe: AgentPipe) -> None:
        self._pipe = pipe
        self._is_watched = False
        self._write, self._parts = _shard_file.write, _shard_file._parts
        self._sync, self._fsync, self._send = _shard_file.sync_folder, os.fsync, pipe.send

    def install(self) -> None:
        _shard_file.write = self.write
        _shard_file._parts = self.parts
        _shard_file.sync_folder = self.sync_folder
        _os.fsync = self.fsync
        self._pipe.send = self.send  # type: ignore[method-assign]  # the same shape

    def write(
        self,
        folder: Path,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        text: Mapping[str, str],
        go_on: Callable[[], None],
    ) -> ShardFile:
        self._is_watched = SAVES in folder.name
        self._strike("before_write")
        if self._is_watched and is_armed("disk_full"):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))
            try:
                return cast("ShardFile", self._write(folder, rank, tensors, text, go_on))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return cast("ShardFile", self._write(folder, rank, tensors, text, go_on))

    def parts(
        self, tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]
    ) -> Iterator[bytes | memoryview]:
        for number, part in enumerate(self._parts(tensors, text)):
            yield part
            if number == 4:
                self._strike("within_write")

    def fsync(self, descriptor: Any) -> None:  # noqa: ANN401 as the system's
        is_shard = Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".partial"
        if is_shard:
            self._strike("before_sync")
        self._fsync(descriptor)
        if is_shard:
            self._strike("after_sync")

    def sync_folder(self, folder: Path) -> None:
        self._strike("before_folder_sync")
        self._sync(folder)

    def send(self, message: RankMessage) -> None:
        if isinstance(message, RankVote):
            self._strike("before_vote")
        self._send(message)
        if isinstance(message, RankVote):
            self._strike("after_vote")

    def _strike(self, point: str) -> None:
        if self._is_watched:
            strike(point)
