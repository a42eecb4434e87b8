"""Has operators give the same bits each time."""

import os
from typing import Final

import torch

# NVIDIA's documentation of cuBLAS, "Results reproducibility": eight buffers of 4 MiB a stream.
_CUBLAS: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make_deterministic() -> None:
    """From now on operators of this process give the same bits each time, or raise.

    Those that have no such way raise ``RuntimeError``, with their name. It must be called before the
    process touches an accelerator: cuBLAS looks at its setting once.
    """
    name, value = _CUBLAS
    os.environ[name] = value  # noqa: TID251 (it is written, for a library that looks nowhere else)
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
