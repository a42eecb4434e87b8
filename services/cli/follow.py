"""Following a job until it ends: a live progress bar, or plain lines where there is no terminal."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.figures import duration, number, state_text, throughput
from services.cli.tables import ranks_table
from services.contract.api.views import JobView, RankList, RankView
from services.contract.words.states import TERMINAL_STATES, JobState

POLL_S: Final = 0.5
_PLAIN_EVERY_S: Final = 5.0
_LINES_BESIDE: Final = 6
_LINES_AT_LEAST: Final = 4
RESTING_STATES: Final = TERMINAL_STATES | {JobState.PAUSED}


def follow(client: Client, job_id: str, console: Console, *, every_rank: bool = False) -> JobView:
    """Show the job until it has ended or is paused, and return its last state.

    Args:
        client: Asked twice a second.
        job_id: The job.
        console: Written to: a live view, or lines if it is no terminal.
        every_rank: Live, with a table of the ranks in place of a line each.
    """
    if console.is_terminal:
        return _follow_live(client, job_id, console, every_rank=every_rank)
    return _follow_plainly(client, job_id, console)


def rested(client: Client, job_id: str) -> JobView:
    """The job once it has ended or is paused."""
    job, _ = list(_observe(client, job_id, with_ranks=False))[-1]
    return job


def _follow_live(client: Client, job_id: str, console: Console, *, every_rank: bool) -> JobView:
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
            shown = rank_rows(ranks, console.height) if every_rank else _rank_lines(ranks)
            live.update(Group(_headline(job), bar, *shown))
    return job


def _follow_plainly(client: Client, job_id: str, console: Console) -> JobView:
    seen: list[JobView] = []

    def noted() -> Iterator[tuple[JobView, RankList]]:
        for job, ranks in _observe(client, job_id):
            seen[:] = [job]
            yield job, ranks

    for line in plain_lines(noted(), time.monotonic):
        console.print(line, soft_wrap=True)
    return seen[0]


def plain_lines(
    observed: Iterable[tuple[JobView, RankList]], now: Callable[[], float]
) -> Iterator[str]:
    """A line for each change of state or reason, and for other changes one in five seconds.

    Args:
        observed: The job and its ranks, again and again.
        now: Seconds of a clock that only goes forward.
    """
    told: tuple[JobState, str | None] | None = None
    last = ""
    next_line = 0.0
    for job, ranks in observed:
        changed = (job.state, job.reason) != told
        phases = "".join(f" {rank.rank}:{rank.phase}" for rank in ranks.items)
        figures = f"{_plain_figures(job)}{phases}"
        if changed or (figures != last and now() >= next_line):
            told, last = (job.state, job.reason), figures
            next_line = now() + _PLAIN_EVERY_S
            why = f" ({job.reason})" if changed and job.reason else ""
            yield f"{job.state}{why}{figures}"


def _plain_figures(job: JobView) -> str:
    """How far it is, once there is a step."""
    if not job.progress.step:
        return ""
    told = "?" if job.progress.of is None else job.progress.of
    return f" step {job.progress.step}/{told} {_figures(job)}"


def _observe(
    client: Client, job_id: str, *, with_ranks: bool = True
) -> Iterator[tuple[JobView, RankList]]:
    """The job and its ranks twice a second, the last time once it rests."""
    nothing = RankList(attempt=0, items=())
    while True:
        job = client.job(job_id)
        yield job, client.ranks(job_id) if with_ranks else nothing
        if job.state in RESTING_STATES:
            return
        time.sleep(POLL_S)  # noqa: TID251 a poll over REST has nothing else to wait on


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


def rank_rows(ranks: RankList, height: int) -> Iterable[RenderableType]:
    """The ranks for which there are lines: of many, those that the others wait for and those behind."""
    room = max(height - _LINES_BESIDE, _LINES_AT_LEAST)
    every = ranks.items
    if len(every) <= room:
        return [Text(""), ranks_table(ranks)] if every else []
    first = sorted(every, key=_most_interesting)[:room]
    few = ranks.model_copy(update={"items": tuple(sorted(first, key=lambda rank: rank.rank))})
    left_out = f"and {len(every) - room} more; these are the ones that the others wait for"
    return [Text(""), ranks_table(few), Text(left_out, style="dim")]


def _most_interesting(rank: RankView) -> tuple[bool, float, int, int]:
    return not rank.is_straggler, -(rank.straggler_score or 0.0), rank.step, rank.rank
