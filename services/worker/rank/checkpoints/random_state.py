"""The states of the generators of random numbers of one rank, as tensors and text."""

import random
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch

_TORCH: Final = "random.torch"
_CUDA: Final = "random.cuda"
_NUMPY_SEEDS: Final = 1 << 32
RANDOM_NAMES: Final = (_TORCH, _CUDA)
"""Names of tensors in a shard file that nothing else may have."""


class HasTensors(Protocol):
    """Where saved tensors are read."""

    def tensor(self, name: str) -> torch.Tensor:
        """One of them."""
        ...


def random_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Those that are tensors, by the names in a shard file."""
    tensors = {_TORCH: torch.get_rng_state()}
    if device.type == "cuda":
        tensors[_CUDA] = torch.cuda.get_rng_state(device)
    return tensors


def random_text() -> dict[str, Any]:
    """Those that are no tensors, as JSON."""
    return {"python_random": random.getstate(), "numpy_random": _numpy_state()}


def seed_random(seed: int) -> None:
    """Seeds all of them: those of Python, NumPy, and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def restore_random(device: torch.device, reader: HasTensors, about: Mapping[str, Any]) -> None:
    """Sets all of them as they were saved.

    Args:
        device: Of the rank.
        reader: Of the file that this rank saved.
        about: What ``random_text`` gave, among others.
    """
    torch.set_rng_state(reader.tensor(_TORCH))
    if device.type == "cuda":
        torch.cuda.set_rng_state(reader.tensor(_CUDA), device)
    version, words, gauss = about["python_random"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(about["numpy_random"])


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    words = state["state"]
    return {**state, "state": {"key": words["key"].tolist(), "pos": words["pos"]}}
