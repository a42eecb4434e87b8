"""Memory of one rank, by what it is for, and its peak."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

MemoryKind = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "unsharded",
    "whole_gradients",
    "activations",
    "communication",
    "workspace",
]


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for.

    Attributes:
        parameters: Slices, as they are padded.
        buffers: The model's, whole.
        gradients: Of slices.
        optimizer: Its state, and what a step of it needs.
        unsharded: Whole parameters, and slices kept for a smaller group. Of parameters that are one
            copy for all ranks of a host each rank's part is in `parameters`.
        whole_gradients: As autograd makes them, until they are reduced.
        activations: What forward and backward compute.
        communication: What is being gathered or reduced, what the library for it takes, and what
            this rank has in memory that ranks share, but for its slices.
        workspace: What operators take within themselves.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    whole_gradients: int = 0
    activations: int = 0
    communication: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Peak:
    """The most memory that is held at once.

    Attributes:
        memory: What it consists of.
        where: In which phase of the step.
        unit: The unit at work; "" for the root or none.
    """

    memory: Memory
    where: str
    unit: str

    @classmethod
    def none(cls) -> Peak:
        """Of a time when nothing is held."""
        return cls(Memory(), "", "")


class Ledger:
    """Adds up what is allocated and freed, and remembers the peak."""

    def __init__(self, granularity: int) -> None:
        """Begins with nothing.

        Args:
            granularity: Allocations are rounded up to multiples of so many bytes.
        """
        self._granularity = granularity
        self._now: dict[MemoryKind, int] = dict.fromkeys(asdict(Memory()), 0)  # type: ignore[arg-type]  # its fields are the kinds
        self._total = 0
        self._where = ("", "")
        self._best = 0
        self.peak = Peak.none()

    def enter(self, where: str, unit: str) -> None:
        """What follows happens in this phase."""
        self._where = (where, unit)

    def add(self, kind: MemoryKind, nbytes: int) -> int:
        """Allocates one tensor; returns what it takes, to be given to `free`."""
        taken = self.taken_by(nbytes)
        self.shift(kind, taken)
        return taken

    def taken_by(self, nbytes: int) -> int:
        """What a tensor of so many bytes takes."""
        return -(-nbytes // self._granularity) * self._granularity

    def free(self, kind: MemoryKind, taken: int) -> None:
        """Frees what `add` returned, or a sum of it."""
        self.shift(kind, -taken)

    def shift(self, kind: MemoryKind, taken: int, *, peak: int = 0, within: int = 0) -> None:
        """Changes what is held.

        Args:
            kind: What for.
            taken: More, or less, than before.
            peak: Most that was held in between, over what was held before.
            within: The same with what operators took within themselves.
        """
        if peak > 0:
            self._note(kind, peak)
        if within > max(peak, 0):
            self._note(kind, max(peak, 0), workspace=within - max(peak, 0))
        self._now[kind] += taken
        self._total += taken
        if taken > 0:
            self._note(kind, 0)

    def reset(self, kind: MemoryKind) -> None:
        """Nothing of it is held any more."""
        self.shift(kind, -self._now[kind])

    def forget_peak(self) -> None:
        """Looks for the peak from now on."""
        self._best = 0

    def _note(self, kind: MemoryKind, extra: int, *, workspace: int = 0) -> None:
        if self._total + extra + workspace > self._best:
            self._best = self._total + extra + workspace
            held = {**self._now, kind: self._now[kind] + extra}
            held["workspace"] += workspace
            self.peak = Peak(Memory(**held), *self._where)
