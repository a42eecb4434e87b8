"""A model that says as whom it runs and what it can read."""

import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from services.worker.rank.models.decoder import Decoder


class CuriousDecoder(Decoder):
    """Tries to read files when it is made, and takes its time and no processor.

    Args:
        files: Their paths; ``parent`` stands for the process that forked this one.
        pace_s: A rest before each pass.
        sizes: Of the decoder.
    """

    def __init__(self, files: Sequence[str], pace_s: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self._pace_s = pace_s
        found = {}
        for name in files:
            path = Path(name.replace("parent", str(os.getppid())))
            try:
                found[name] = f"{len(path.read_bytes())} bytes"
            except OSError as error:
                found[name] = type(error).__name__
        said = f"as {os.getresuid()} {os.getgroups()}: {sorted(set(found.values()))}"
        sys.stdout.write(said + "\n")
        sys.stdout.write(f"in {Path.cwd()}, with the agent's key: {_sees('of the agent')}\n")
        with tempfile.NamedTemporaryFile(dir=cache_dir()) as compiled:
            sys.stdout.write(f"may compile: {compiled.file.writable()}\n")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(self._pace_s)
        return super().forward(tokens)


def _sees(key: str) -> bool:
    """Whether the kernel lists a key of this name to this process, which it does for those that it may use."""
    try:
        return key in Path("/proc/keys").read_text()
    except OSError:
        return False
