"""How a rank is asked for its Python stacks: a signal, and the file into which it writes them.

The handler is faulthandler's. It runs in C on whichever thread the kernel chooses and takes no
lock, so it answers while the training thread waits in C++ and while C code holds the
interpreter's lock. Only a process that is stopped does not answer. System calls are restarted.
"""

import signal
from pathlib import Path
from typing import Final

# Not SIGUSR1 or SIGUSR2: those are the user's. Real-time signals are nobody's by custom.
STACKS_SIGNAL: Final = int(signal.SIGRTMIN) + 12


def stacks_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` appends its stacks, in the attempt's folder."""
    return folder / f"rank-{rank}.stacks"
