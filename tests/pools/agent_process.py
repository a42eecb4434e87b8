"""What stands for an agent where only its processes matter: it starts a rank, and ends it on SIGTERM.

``python agent_process.py PATH`` writes the process ids to ``PATH.agent`` and
``PATH.rank``, and makes ``PATH.told`` once it was told to end; its rank makes ``PATH.signalled`` if it was.
With a further argument it never ends by itself.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

_RANK = """
import signal, sys
from pathlib import Path
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: Path(sys.argv[1]).touch())
print(flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Run until SIGTERM."""
    path = Path(sys.argv[1])
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, path.with_suffix(".signalled")],
        stdin=subprocess.PIPE,  # it ends with the agent
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert rank.stdout is not None
    rank.stdout.readline()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    path.with_suffix(".rank").write_text(str(rank.pid))
    path.with_suffix(".agent").write_text(f"{os.getpid()}\n")
    signal.sigwait({signal.SIGTERM})
    path.with_suffix(".told").touch()
    while len(sys.argv) > 2:
        signal.pause()
    rank.kill()
    rank.wait()


if __name__ == "__main__":
    main()
