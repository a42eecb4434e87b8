"""``python -m services.worker.agent``: the agent of this node, until SIGTERM or SIGINT.

With ``--check`` it only looks whether this node's agent is alive: exit code 0 if so, else 1.
"""

import argparse
import asyncio
import io
import os
import signal
import sys
from typing import TextIO

import structlog
from pydantic import ValidationError

from services.contract.system.own_process import set_up_process
from services.contract.words.control_characters import harmless, one_line
from services.contract.words.error_values import setting_faults
from services.worker.agent.agent import run_agent
from services.worker.agent.host.folders import NodeBusyError, NoHomeError
from services.worker.agent.host.network import NetworkError
from services.worker.agent.session import LeaseTakenError
from services.worker.agent.settings import AgentSettings
from services.worker.agent.streams.lease_check import lease_is_held

_NOT_ALIVE = 1
_BAD_SETTINGS = 2
_NOT_ALONE = 3


def main() -> None:
    """Run the agent. Exit code 2: bad settings; 3: another agent has this node."""
    set_up_process(holds_secrets=True)
    parser = argparse.ArgumentParser(prog="python -m services.worker.agent")
    parser.add_argument("--check", action="store_true", help="only see whether it is alive")
    only_check = parser.parse_args().check
    log_plainly()
    try:
        settings = AgentSettings()
    except ValidationError as error:
        for fault in setting_faults(error):
            sys.stderr.write(f"meshloom agent: {fault}\n")
        sys.exit(_BAD_SETTINGS)
    if only_check:
        sys.exit(0 if lease_is_held(settings.redis_address, settings.node_id) else _NOT_ALIVE)
    try:
        asyncio.run(_serve(settings))
    except (NetworkError, NoHomeError) as error:
        sys.stderr.write(f"meshloom agent: {error}\n")
        sys.exit(_BAD_SETTINGS)
    except (LeaseTakenError, NodeBusyError) as error:
        # Who has the lease is what Redis says.
        sys.stderr.write(f"meshloom agent: {one_line(str(error))}\n")
        sys.exit(_NOT_ALONE)
    # Python would wait for the threads that wait for a storage, which may not answer for minutes.
    sys.stderr.flush()
    os._exit(0)


def log_plainly() -> None:
    """Log to stderr, with tracebacks as Python writes them, and no control characters of what is told.

    As structlog writes them by itself, with the source and all variables, each takes the loop a second: a few would
    cost the node its lease.
    """
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=_write_traceback
    )
    structlog.configure(
        processors=[*structlog.get_config()["processors"][:-1], _with_harmless_texts, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _write_traceback(file: TextIO, about: structlog.typing.ExcInfo) -> None:
    written = io.StringIO()
    structlog.dev.plain_traceback(written, about)
    file.write(harmless(written.getvalue()))


def _with_harmless_texts(
    _logger: structlog.typing.WrappedLogger, _method: str, entry: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    # Ranks choose names of folders that are removed later. structlog escapes texts that have a blank alone.
    return {
        name: harmless(value) if isinstance(value, str) else value for name, value in entry.items()
    }


async def _serve(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_agent(settings, stop)


if __name__ == "__main__":
    main()
