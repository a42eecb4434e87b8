"""``python -m services.local up`` keeps a stack running; ``run FILE`` runs one job on it."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from rich.console import Console

from services.contract.system.own_process import set_up_process
from services.contract.words.error_values import setting_faults
from services.local.children import die_with_parent
from services.local.embedded_redis import RedisUnavailableError
from services.local.settings import LocalSettings, child_environment
from services.local.stack import StackError, running_stack, stack_is_up

_CANNOT_START: Final = 2
_INTERRUPTED: Final = 128 + signal.SIGINT
_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(
    help="Redis, controller and one agent on this machine, under one owner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


@app.command()
def up() -> None:
    """Keep the services running until Ctrl-C."""
    asyncio.run(_up(_settings()))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job spec in YAML.")],
) -> None:
    """Run the job in FILE from submission to its end, then stop what was started."""
    settings = _settings()
    if stack_is_up(settings):
        console.print("a stack already runs on this home; the job runs there")
        raise typer.Exit(asyncio.run(_follow(file, f"http://{settings.host}:{settings.port}")))
    raise typer.Exit(asyncio.run(_run(settings, file)))


def _settings() -> LocalSettings:
    try:
        return LocalSettings()
    except ValidationError as error:
        raise StackError("; ".join(setting_faults(error))) from None


async def _up(settings: LocalSettings) -> None:
    async def serve() -> int:
        async with running_stack(settings) as url:
            console.print(f"Meshloom is up: {url}  (Ctrl-C stops it; state in {settings.home})")
            return await asyncio.Future()

    await _until_signalled(serve())
    console.print("stopped")


async def _run(settings: LocalSettings, file: Path) -> int:
    async def train() -> int:
        async with running_stack(settings) as url:
            console.print(f"Meshloom is up; dashboard {url}")
            return await _follow(file, url)

    code = await _until_signalled(train())
    if code is None:
        console.print("stopped; `make run` continues the unfinished job from its checkpoint")
        return _INTERRUPTED
    return code


async def _until_signalled(work: Coroutine[None, None, int]) -> int | None:
    """The result of ``work``; None, once all of it is undone, if a signal asked to end."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _follow(file: Path, url: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "services.cli", "submit", file, "--follow", "--rejoin"),
        env=child_environment(MESHLOOM_URL=url),
        # A session of its own: Ctrl-C is the owner's, who ends the follower too.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    set_up_process(holds_secrets=True)
    try:
        app()
    except (OSError, StackError, RedisUnavailableError) as error:
        console.print(f"meshloom: {error}", style="red")
        sys.exit(_CANNOT_START)
