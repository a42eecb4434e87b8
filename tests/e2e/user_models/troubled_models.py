"""Models and data of which one rank gets into trouble in its own way, in its third step."""

import ctypes
import resource
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from torch import nn

from services.worker.rank.data.stdlib_bytes import stdlib_bytes

VOCAB = 256
TROUBLE_AT = 3
MIB = 1 << 20


class Calm(nn.Module):
    """Enough of a language model to train; ``blocks`` are to be units of their own."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)
        self.passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.training:
            self.passes += 1
            if torch.distributed.get_rank() == 1:
                self.rank_one(self.passes)
        for number, block in enumerate(self.blocks):
            if not self.skips(number):
                x = block(x)
        logits: torch.Tensor = self.head(x)
        return self.spoilt(logits)

    def rank_one(self, passes: int) -> None:
        """What rank 1 does in every pass."""
        if passes == TROUBLE_AT:
            self.trouble()

    def trouble(self) -> None:
        """What is wrong with rank 1."""

    def skips(self, number: int) -> bool:  # noqa: ARG002 subclasses look at it
        """Whether this rank leaves a block out."""
        return False

    def spoilt(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, or what became of them."""
        return logits


class SlowOnRankOne(Calm):
    """Rank 1 computes far more than the other."""

    def rank_one(self, passes: int) -> None:  # noqa: ARG002 in every pass
        work = torch.ones(384, 384)
        for _ in range(12):
            work = work @ work / 384


class Crashes(Calm):
    """Native code reads where nothing is."""

    def trouble(self) -> None:
        ctypes.string_at(0)


class Raises(Calm):
    """The user's own mistake."""

    def trouble(self) -> None:
        raise ValueError("the user's third pass")


class RunsOutOfMemory(Calm):
    """It asks for more than its limit allows."""

    def trouble(self) -> None:
        limit = psutil.Process().memory_info().vms + 256 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(1024 * MIB, dtype=torch.uint8)


class HoldsTheLock(Calm):
    """C code that waits forever and keeps the interpreter's lock: a mutex taken twice."""

    def trouble(self) -> None:
        threads = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(64)
        threads.pthread_mutex_lock(mutex)
        threads.pthread_mutex_lock(mutex)


class WaitsForever(Calm):
    """Python code that waits and lets others run."""

    def trouble(self) -> None:
        threading.Event().wait()


class SkipsAUnit(Calm):
    """Rank 1 leaves a block out that the other runs."""

    def skips(self, number: int) -> bool:
        late = self.training and self.passes >= TROUBLE_AT
        return late and number == 0 and torch.distributed.get_rank() == 1


class TurnsNaN(Calm):
    """On one rank the logits stop being numbers; with ``once``, only until that file is there."""

    def __init__(self, dim: int = 16, once: str | None = None) -> None:
        super().__init__(dim)
        self.once = None if once is None else Path(once)

    def spoilt(self, logits: torch.Tensor) -> torch.Tensor:
        if self.passes != TROUBLE_AT or not self.training or torch.distributed.get_rank() != 1:
            return logits
        if self.once is not None:
            if self.once.exists():
                return logits
            self.once.touch()
        return logits * float("nan")


class StallingData:
    """On rank 1 the third batch never comes."""

    def __init__(self, seed: int = 0, seq_len: int = 32) -> None:
        self._source = stdlib_bytes(seed=seed, seq_len=seq_len)

    @property
    def digest(self) -> str:
        return self._source.digest

    def batch(self, step: int, indices: Sequence[int]) -> torch.Tensor:
        if step == TROUBLE_AT and torch.distributed.get_rank() == 1:
            threading.Event().wait()
        return self._source.batch(step, indices)

    def validation(self) -> Sequence[torch.Tensor]:
        return self._source.validation()

    def baselines(self) -> Mapping[str, float]:
        return self._source.baselines()
