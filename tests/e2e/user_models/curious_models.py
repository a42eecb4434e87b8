"""A model that says as whom it runs and what it can read."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.worker.rank.models.decoder import Decoder


class CuriousDecoder(Decoder):
    """Tries to read files when it is made.

    Args:
        files: Their paths; ``parent`` stands for the process that forked this one.
        sizes: Of the decoder.
    """

    def __init__(self, files: Sequence[str], **sizes: int) -> None:
        super().__init__(**sizes)
        found = {}
        for name in files:
            path = Path(name.replace("parent", str(os.getppid())))
            try:
                found[name] = f"{len(path.read_bytes())} bytes"
            except OSError as error:
                found[name] = type(error).__name__
        said = f"as {os.getresuid()} {os.getgroups()}: {sorted(set(found.values()))}"
        sys.stdout.write(said + "\n")
