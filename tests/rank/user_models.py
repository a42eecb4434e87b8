"""Models as users write them, named in specs as ``tests.rank.user_models:…``."""

import io
import os
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.waiting import until

VOCAB = 256


class Noisy(nn.Module):
    """Plain torch modules without a promise; draws from every random state that is saved."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        if self.training:
            x = x * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))  # noqa: S311 no secret
        logits: torch.Tensor = self.head(x)
        return logits


class Centred(nn.Module):
    """Keeps a mean of what its own rank has seen, as batch norm does, and takes it off; only its evaluation uses the norm's."""

    seen: torch.Tensor

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("seen", torch.zeros(dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.training:
            self.seen.lerp_(x.detach().mean((0, 1)), 0.5)
        logits: torch.Tensor = self.head(self.norm((x - self.seen).mT).mT)
        return logits


class Telling(Centred):
    """Has extra state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class PartlyFrozen(Noisy):
    """Trains above a part that it has set to evaluate, and to stay so."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.norm = nn.BatchNorm1d(dim).eval()
        self.dropout.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.dropout(self.embedding(tokens)).mT).mT
        logits: torch.Tensor = self.head(x)
        return logits


class Counting(Noisy):
    """Counts its passes in a number, and writes it into a buffer for the state dict, from which it takes it back."""

    counted: torch.Tensor

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self._passes = 0
        self.register_buffer("counted", torch.tensor(0))
        self.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]  # PyTorch's

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._passes += 1
            self.counted.fill_(self._passes)
        return super().forward(tokens) * (1 + 0.1 * self._passes)

    @staticmethod
    def _loaded(model: nn.Module, _: object) -> None:
        assert isinstance(model, Counting)
        model._passes = int(model.counted)


class Slow(nn.Module):
    """Has a part that follows another before each pass, as a momentum encoder does; no optimizer trains it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.slow = nn.Embedding(VOCAB, dim).requires_grad_(requires_grad=False)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.slow.weight.data.lerp_(self.embedding.weight.data, 0.5)
        logits: torch.Tensor = self.head(self.embedding(tokens) + self.slow(tokens))
        return logits


class Bounded(Slow):
    """Bounds before each pass what its optimizer trains."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.embedding.weight.clamp_(-1, 1)
        return super().forward(tokens)


class Forking(Noisy):
    """Forks a process in its third pass that ends as a program does, and waits for that."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self._passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._passes += 1
        if self._passes == 3:
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
        return super().forward(tokens)


class Unheard(Noisy):
    """Puts something in the place of its outputs in its third pass: nothing, or what nobody can write to."""

    def __init__(self, kind: str, dim: int = 16) -> None:
        super().__init__(dim)
        self._kind = kind
        self._passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._passes += 1
        if self._passes == 3:
            closed = io.StringIO()
            closed.close()
            put: Any = {"none": None, "closed": closed, "of its own": object()}[self._kind]
            sys.stdout = sys.stderr = put
        return super().forward(tokens)


class Hashed(Noisy):
    """Has a place for every token in a small table."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.embedding = nn.Embedding(64, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens % 64)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten() % VOCAB)


class Renormed(nn.Module):
    """Writes its embedding as it runs, as PyTorch's own module does with ``max_norm``."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim, max_norm=0.5)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


class Watched(Noisy):
    """Evaluated on rank 1, it looks whether parameters change once rank 0 has been evaluated."""

    def __init__(self, folder: str, dim: int = 16) -> None:
        super().__init__(dim)
        self.evaluated = Path(folder) / "rank 0 is evaluated"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        if self.training:
            return logits
        if dist.get_rank() == 0:
            self.evaluated.touch()
            return logits
        before = self.head.weight.clone()
        until(self.evaluated.exists)
        for _ in range(5_000):
            if not torch.equal(self.head.weight, before):
                raise RuntimeError("parameters were written while a rank computed with them")
        return logits


def counting_segments(output: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss of the next token, and how many segments of shared memory the rank has mapped."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:fsdp_core")
    return {
        "loss": functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
        "segments": torch.tensor(float(mapped)),
    }


class OwnLoss(nn.Module):
    """Computes its loss itself and refuses to be called for logits."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class FailsOnOneRank(Noisy):
    """Raises in its third forward pass on rank 1."""

    passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3 and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("the user's third pass")
        return super().forward(tokens)


class HeldUp(nn.Module):
    """On rank 0, its second block trains only once somebody writes to a FIFO.

    Args:
        fifo: Path of the FIFO.
    """

    def __init__(self, fifo: str, dim: int = 16) -> None:
        super().__init__()
        self.fifo = fifo
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.blocks[1].register_forward_pre_hook(self._wait)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits

    def _wait(self, *_: object) -> None:
        if self.training and torch.distributed.get_rank() == 0:
            Path(self.fifo).read_bytes()


class Explodes(Noisy):
    """Its logits are not numbers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * float("nan")


class Remembers(nn.Module):
    """Each training pass changes a buffer, on which the next depends; a bad one may come.

    Args:
        dim: Of its embedding.
        spoilt_pass: In this pass its logits are not numbers.
    """

    memory: torch.Tensor

    def __init__(self, dim: int = 16, spoilt_pass: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("memory", torch.zeros(VOCAB))
        self.spoilt_pass = spoilt_pass
        self.passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(self.embedding(tokens))) + self.memory
        if self.training:
            self.passes += 1
            self.memory.lerp_(self.head.weight.detach().mean(1), 0.1)
            if self.passes == self.spoilt_pass:
                return logits * float("nan")
        return logits


class BreaksItsPromise(nn.Module):
    """Says ``meta_init``, but owns a parameter that nothing fills."""

    meta_init: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


NOT_CALLABLE = 3


class Particular(OwnLoss):
    """Raises when it is built with arguments that do not go together."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(dim=16)
        if 16 % heads:
            raise ValueError(f"{heads} heads do not divide 16")


class AsksForItsRank(OwnLoss):
    """Can be built only beside other ranks."""

    def __init__(self) -> None:
        super().__init__(dim=16 * torch.distributed.get_world_size())


class LooksAtValuesWhenBuilt(OwnLoss):
    """Cannot be built where tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(4) / 30]


class LooksAtValuesInItsLoss(OwnLoss):
    """Can be followed by nobody who has no values."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().loss(tokens)
        return loss if loss.item() < 100 else loss / 2


class ComparesTheBatch(OwnLoss):
    """Takes no micro-batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embedding(tokens[:, 0])))
        return functional.cross_entropy(logits, tokens[:, 1])


def own_llama() -> nn.Module:
    """A model of transformers as people make one in a factory of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (slow to import)

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )  # fmt: skip
