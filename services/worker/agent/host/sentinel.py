"""``python -m services.worker.agent.host.sentinel``: sees to it that nothing outlives an agent.

The kernel ends the ranks with their agent, but not what the ranks started. So each life of an agent
has this process beside it, which learns of its end, of any kind, from the end of a pipe. It is
small, in a session of its own, and carries no mark, so that nothing that ends the others ends it.
"""

import argparse
import contextlib
import os
import select
import signal
from typing import Final

import psutil

from services.contract.system.own_process import set_up_process
from services.worker.agent.host.processes import await_passed_over, marked

_QUIET_LOOKS: Final = 3
_BETWEEN_LOOKS_S: Final = 0.05
_GONE_WITHIN_S: Final = 1.0


def main() -> None:
    """Wait for the end of the agent, then end everything that carries the mark of its life."""
    set_up_process()
    parser = argparse.ArgumentParser(prog="python -m services.worker.agent.host.sentinel")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor; the agent's end of it")
    parser.add_argument("--mark", required=True, help="what the environment of its processes says")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(arguments.pipe, 1)
    end_all(arguments.mark)


def end_all(mark: str) -> None:
    """SIGKILL whoever carries the mark, until nobody does, nor one may whose memory did not answer."""
    quiet = 0
    # One look is not enough: a process that calls exec has no environment for a moment.
    while quiet < _QUIET_LOOKS or await_passed_over():
        living = marked(mark)
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(living, timeout=_GONE_WITHIN_S)
        quiet = 0 if living else quiet + 1
        select.select((), (), (), _BETWEEN_LOOKS_S)


if __name__ == "__main__":
    main()
