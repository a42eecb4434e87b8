"""Data as users write it, named in specs as ``tests.rank.user_data:…``."""

from collections.abc import Mapping, Sequence

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
