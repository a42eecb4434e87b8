"""Following a job until it ends: a live progress bar, or plain lines where there is no terminal."""

import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.tables import duration, number, state_text, throughput
from services.contract.api.views import JobView, RankList
from services.contract.words.states import TERMINAL_STATES, JobState

_POLL_S = 0.5
_PLAIN_EVERY_S = 5.0
_RESTING_STATES = TERMINAL_STATES | {JobState.PAUSED}


def follow(client: Client, job_id: str, console: Console) -> JobView:
    """Show the job until it has ended or is paused, and return its last state."""
    if console.is_terminal:
        return _follow_live(client, job_id, console)
    return _follow_plainly(client, job_id, console)


def _follow_live(client: Client, job_id: str, console: Console) -> JobView:
    job = client.job(job_id)
    bar = Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        console=console,
        expand=True,
    )
    task = bar.add_task(job_id, total=None, figures="")
    with Live(console=console, refresh_per_second=4) as live:
        for job, ranks in _observe(client, job_id):
            bar.update(
                task,
                description=job.name,
                total=job.progress.of,
                completed=job.progress.step,
                figures=_figures(job),
            )
            live.update(Group(_headline(job), bar, *_rank_lines(ranks)))
    return job


def _follow_plainly(client: Client, job_id: str, console: Console) -> JobView:
    job = client.job(job_id)
    said: tuple[JobState, str | None] | None = None
    next_line = 0.0
    for job, ranks in _observe(client, job_id):
        changed = (job.state, job.reason) != said
        if changed or time.monotonic() >= next_line:
            said = (job.state, job.reason)
            next_line = time.monotonic() + _PLAIN_EVERY_S
            phases = " ".join(f"{rank.rank}:{rank.phase}" for rank in ranks.items)
            why = f" ({job.reason})" if changed and job.reason else ""
            told = "?" if job.progress.of is None else job.progress.of
            console.print(
                f"{job.state}{why} step {job.progress.step}/{told} {_figures(job)} {phases}",
                soft_wrap=True,
            )
    return job


def _observe(client: Client, job_id: str) -> Iterator[tuple[JobView, RankList]]:
    """The job and its ranks twice a second, the last time once it rests."""
    while True:
        job = client.job(job_id)
        yield job, client.ranks(job_id)
        if job.state in _RESTING_STATES:
            return
        time.sleep(_POLL_S)  # noqa: TID251 a poll over REST has nothing else to wait on


def _headline(job: JobView) -> Text:
    return Text.assemble(state_text(job.state), "  ", (job.reason or "", "dim"))


def _figures(job: JobView) -> str:
    progress = job.progress
    return (
        f"loss {number(progress.loss, '{:.4f}')}  {throughput(progress)}  "
        f"eta {duration(progress.eta_s)}"
    )


def _rank_lines(ranks: RankList) -> Iterator[Text]:
    for rank in ranks.items:
        unit = f" {rank.unit}" if rank.unit else ""
        yield Text(f"  rank {rank.rank} on {rank.node_id}  step {rank.step}  {rank.phase}{unit}")
