"""Worker processes of a rank that read its share of later steps beside the present one."""

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from meshloom.data import Batch
from services.worker.rank.data.order import Ref
from services.worker.rank.data.samples import SampleReader
from services.worker.rank.process.warm import die_with_parent


@dataclass(frozen=True)
class Workers:
    """How many processes read ahead, and how.

    Attributes:
        count: At least 1.
        prefetch: Steps that each of them reads ahead.
        init: The user's, called in each with its number.
    """

    count: int
    prefetch: int
    init: Callable[[int], None] | None = None


class WorkerError(RuntimeError):
    """A worker process raised what cannot be sent to its rank."""


@dataclass(frozen=True)
class _Raised:
    """What a worker raised instead of a batch, with the traceback as its process saw it."""

    error: Exception


def read_ahead(
    reader: SampleReader, steps: Iterable[list[Ref]], workers: Workers
) -> Iterator[Batch]:
    """The batch of each of ``steps``, in order. Close the generator to end the processes.

    Workers are forked, as PyTorch's are: they see what the rank has read, and must not touch an
    accelerator. They die with the rank, however it ends.
    """
    loader: DataLoader[Any] = DataLoader(
        _Reading(reader),
        sampler=_Steps(steps),
        batch_size=None,
        collate_fn=_same,
        worker_init_fn=partial(begin_worker, os.getpid(), workers.init),
        generator=torch.Generator(),  # else it draws from the one that drops out
        **processes(workers),
    )
    yield from _checked(loader)


def processes(workers: Workers) -> dict[str, Any]:
    """Options of a ``DataLoader``."""
    return {
        "num_workers": workers.count,
        "prefetch_factor": workers.prefetch,
        "multiprocessing_context": "fork",
    }


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begins to go through ``loader``, its workers forked."""
    with warnings.catch_warnings():
        # Python from 3.12 on warns of every fork beside threads, and a rank has some.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        return iter(loader)


def begin_worker(rank: int, init: Callable[[int], None] | None, number: int) -> None:
    """What a worker does first: it is bound to its rank's life."""
    die_with_parent(rank)
    if init is not None:
        init(number)


class _Reading(Dataset[Any]):
    """Answers a list of references with their batch."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __getitem__(self, refs: list[Ref]) -> object:
        try:
            return self._reader.batch(refs)
        except Exception as error:  # noqa: BLE001 whatever a user's data set raises is the rank's
            seen = f"in a worker process:\n{traceback.format_exc()}"
            error.add_note(seen)
            return _Raised(error if _travels(error) else WorkerError(f"{error!r} {seen}"))


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (what this process has just written)
    except Exception:  # noqa: BLE001 whatever an exception's own methods raise
        return False
    return True


class _Steps(Sampler[list[Ref]]):
    def __init__(self, steps: Iterable[list[Ref]]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[list[Ref]]:
        return iter(self._steps)


def _same(batch: Batch) -> Batch:
    return batch


def _checked(loader: DataLoader[Any]) -> Iterator[Batch]:
    found = begun(loader)
    for batch in found:
        if isinstance(batch, _Raised):
            raise batch.error
        yield batch
