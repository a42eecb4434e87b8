"""Data as users write it, named in specs as ``tests.rank.user_data:…``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


class Counting:
    """Sequences that count upwards from a number of their own; nothing to validate on."""

    def __init__(self, length: int = 8, *, differs: bool = False) -> None:
        self._length = length
        self._differs = differs

    @property
    def digest(self) -> str:
        rank = torch.distributed.get_rank() if self._differs else 0
        return f"counting {rank}"

    def batch(self, step: int, indices: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor([step * 31 + index * 7 for index in indices])
        return (starts[:, None] + torch.arange(self._length + 1)) % 256

    def validation(self) -> Sequence[torch.Tensor]:
        return []

    def baselines(self) -> Mapping[str, float]:
        return {}


class Particular(Counting):
    """Looks for a setting that it was not given."""

    def __init__(self, **settings: int) -> None:
        super().__init__(settings["width"])


class OnAnotherNode(Counting):
    """Reads a file that is not on this node."""

    def __init__(self) -> None:
        super().__init__(len(Path("/nowhere/data.bin").read_bytes()))
