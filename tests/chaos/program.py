"""The chaos program: long jobs on a cluster of our own, and one fault after the other."""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
import redis
from rich.console import Console
from tenacity import RetryError

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.contract.api.views import AttemptView, JobView, StopRequest
from services.contract.messages.telemetry import StepRecord
from services.contract.words.states import JobState
from tests.chaos import invariants
from tests.chaos.faults import Planned, Scene, schedule
from tests.chaos.figures import Figures, Injected
from tests.chaos.invariants import Losses, ViolationError
from tests.chaos.watch import Watch, logged_step
from tests.cluster import Cluster
from tests.e2e.conftest import REST
from tests.parts import gone
from tests.waiting import until

SLOTS: Final = {"loom-1": 2, "loom-2": 2}
RANKS: Final = 2
_SIZES: Final = {"dim": 32, "layers": 2, "heads": 2}
_LOOK_EVERY_S: Final = 0.1
_RECOVERS_WITHIN_S: Final = 180.0
_GONE_WITHIN_S: Final = 30.0
_ALONE_WITHIN_S: Final = 1_200.0


@dataclass(frozen=True)
class Options:
    """What to do.

    Attributes:
        seed: Of the faults, their order, their ranks and how long they last.
        minutes: How long faults are injected.
        kill_every_s: Seconds from the end of one fault's effects to the next, on average.
        faults: Stop after so many; None: when the time is over.
        steps: Of a job. When it is done, the same is submitted again.
        pace_s: Rest of a rank before each pass, so that the job takes its time.
        command: How all this was asked for.
    """

    seed: int
    minutes: float
    kill_every_s: float
    faults: int | None = None
    steps: int = 2_000
    pace_s: float = 0.05
    command: str = ""


class ChaosRun:
    """One run of the program.

    Args:
        options: What to do.
        cluster: Entered.
        client: One that does not wait for who is away.
        console: Where progress is told.
    """

    def __init__(
        self, options: Options, cluster: Cluster, client: Client, console: Console
    ) -> None:
        self.figures = Figures(options.seed, options.command)
        self._options = options
        self._cluster = cluster
        self._client = client
        self._console = console
        self._orders = cluster.folder / "orders"
        self._step_times: list[float] = []

    def run(self) -> None:
        """Submit, torment, check; until the time is over or a promise is broken.

        Raises:
            ViolationError: One was; ``figures`` tell what happened until then.
        """
        self._orders.mkdir()
        undisturbed = self._undisturbed()
        plans = schedule(self._options.seed, self._options.kill_every_s, RANKS)
        self._began = time.monotonic()
        planned = next(plans)
        due = self._began + planned.after_s
        try:
            while not self._is_over():
                job_id = self._submit(self._options.pace_s)
                watch = Watch(self._cluster, self._client, job_id)
                while not self._is_over() and self._is_running(job_id):
                    watch.look()
                    if time.monotonic() >= due and self._can_be_hurt(job_id):
                        self._torment(job_id, planned, watch)
                        planned = next(plans)
                        due = time.monotonic() + planned.after_s
                    _wait()
                self._finish(job_id, watch, undisturbed)
        finally:
            self.figures.wall_s = time.monotonic() - self._began
            self.figures.step_time_s = statistics.median(self._step_times or [0.0])

    def _is_over(self) -> bool:
        enough = self._options.faults
        if enough is not None and len(self.figures.faults) >= enough:
            return True
        return time.monotonic() - self._began > self._options.minutes * 60

    def _undisturbed(self) -> Losses:
        """The losses of a job that is left alone, and takes no rests."""
        job_id = self._submit(pace_s=0.0)
        until(lambda: not self._is_running(job_id), timeout_s=_ALONE_WITHIN_S, every_s=0.5)
        job = self._cluster.job(job_id)
        if job.state is not JobState.SUCCEEDED:
            raise ViolationError(f"a job that was left alone is {job.state}: {job.reason}")
        return {record.step: record.loss for record in self._records(job.id)}

    def _submit(self, pace_s: float) -> str:
        arguments = {"orders": str(self._orders), "pace_s": pace_s, **_SIZES}
        job = self._cluster.submit(
            name=f"chaos-{self._options.seed}",
            model={"factory": "faulty_models:FaultyDecoder", "args": arguments},
            train={"steps": self._options.steps, "global_batch": 4, "seed": self._options.seed},
            checkpoint={"every_steps": 50, "keep_last": 3},
            faults={"max_restarts": 1_000},
        )
        return job.id

    def _is_running(self, job_id: str) -> bool:
        job = self._ask(job_id)
        return job is None or job.state not in REST

    def _can_be_hurt(self, job_id: str) -> bool:
        """Whether it trains, and all nodes are there to go on."""
        job, attempt = self._ask(job_id), self._attempt(job_id)
        near_end = job is not None and job.progress.step > self._options.steps - 100
        return (
            job is not None
            and job.state is JobState.RUNNING
            and attempt is not None
            and attempt.first_step is not None
            and not near_end
            and self._cluster.ready() == set(SLOTS)
        )

    def _torment(self, job_id: str, planned: Planned, watch: Watch) -> None:
        """Inject a fault, wait until all is as it should be, note how long that took."""
        job = self._cluster.job(job_id)
        fault = planned.fault
        scene = Scene(self._cluster, job, self._orders, planned.rank)
        noted = Injected(fault.name, time.monotonic() - self._began, planned.away_s)
        self.figures.faults.append(noted)
        words = f"{noted.at_s:6.0f} s  {fault.name}: rank {planned.rank} on {scene.node}"
        self._console.print(f"{words}, {planned.away_s:.1f} s", highlight=False)
        zombies = scene.ranks_on_node() if fault.leaves_zombies else []
        at = datetime.now(UTC)
        with fault.happen(scene):
            over = time.monotonic() + planned.away_s
            self._until(lambda: time.monotonic() >= over, watch, "the fault to be over")
        if zombies:
            healed = time.monotonic()
            self._until(lambda: gone(zombies), watch, f"the zombies' end after {fault.name}")
            noted.gone_s = time.monotonic() - healed
        if fault.ends_attempt:
            self._note_restart(job, at, noted, watch)
        else:
            self._note_truth(job, noted, watch)

    def _note_restart(self, job: JobView, at: datetime, noted: Injected, watch: Watch) -> None:
        def trains_again() -> bool:
            attempt = self._attempt(job.id)
            return attempt is not None and attempt.fence > job.attempt and bool(attempt.first_step)

        self._until(trains_again, watch, f"another attempt after {noted.name}")
        attempts = {a.fence: a for a in self._cluster.client.attempts(job.id).items}
        ended, following = attempts[job.attempt], attempts[job.attempt + 1]
        if ended.ended_at is not None:
            noted.detect_s = (ended.ended_at - at).total_seconds()
        if following.first_step_at is not None:
            noted.first_step_s = (following.first_step_at - at).total_seconds()
        noted.lost_steps = ended.lost_steps or 0
        self._console.print(
            f"          noticed {noted.detect_s} s, first step {noted.first_step_s} s, "
            f"{noted.lost_steps} steps again",
            highlight=False,
        )

    def _note_truth(self, job: JobView, noted: Injected, watch: Watch) -> None:
        back = time.monotonic()
        step = logged_step(self._cluster.folder, job.id)

        def is_truthful() -> bool:
            told = self._ask(job.id)
            return told is not None and told.progress.step >= step

        self._until(is_truthful, watch, f"a truthful status after {noted.name}")
        noted.truthful_s = time.monotonic() - back
        attempt = self._attempt(job.id)
        if attempt is not None and attempt.fence != job.attempt:
            raise ViolationError(f"{noted.name} cost the job its attempt {job.attempt}")
        self._console.print(f"          truthful after {noted.truthful_s:.1f} s", highlight=False)

    def _finish(self, job_id: str, watch: Watch, undisturbed: Losses) -> None:
        """The job at rest: stopped with a checkpoint if it has not ended, and checked."""
        if self._is_running(job_id):
            self._cluster.client.cancel(job_id, StopRequest(checkpoint="required", grace_s=120))
        self._until(lambda: not self._is_running(job_id), watch, "the end of the job")
        job = self._cluster.job(job_id)
        if job.state not in {JobState.SUCCEEDED, JobState.CANCELLED}:
            raise ViolationError(f"the job is {job.state}: {job.reason}")
        watch.conclude()
        records = self._records(job_id)
        self._step_times += [record.step_time_s for record in records]
        losses = {record.step: record.loss for record in records}
        saved = self._cluster.client.checkpoint(str(job.latest_checkpoint)).step
        attempts = self._cluster.client.attempts(job_id).items
        invariants.check_losses(losses, undisturbed, attempts, saved)
        # An attempt before may have come further, and lost that.
        last = max((r.step for r in records if r.fence == job.attempt), default=saved)
        if last != saved:
            raise ViolationError(f"the job ends at step {last}, and step {saved} is saved")
        self.figures.useful_steps += saved
        self.figures.useful_s += sum({r.step: r.step_time_s for r in records}.values())
        self.figures.jobs += 1

    def _records(self, job_id: str) -> list[StepRecord]:
        with redis.Redis.from_url(self._cluster.redis_url, decode_responses=True) as server:
            return invariants.step_records(server, job_id)

    def _ask(self, job_id: str) -> JobView | None:
        try:
            return self._client.job(job_id)
        except CliError:
            return None

    def _attempt(self, job_id: str) -> AttemptView | None:
        """The newest attempt, None if nobody answers or there is none."""
        try:
            attempts = self._client.attempts(job_id).items
        except CliError:
            return None
        return attempts[-1] if attempts else None

    def _until(self, condition: Callable[[], bool], watch: Watch, what: str) -> None:
        deadline = time.monotonic() + _RECOVERS_WITHIN_S
        while not condition():
            watch.look()
            if time.monotonic() > deadline:
                raise ViolationError(f"waited {_RECOVERS_WITHIN_S:.0f} s in vain for {what}")
            _wait()


def torment(options: Options, folder: Path, console: Console) -> Figures:
    """A whole run, in an empty folder; the figures say what was broken, if anything was."""
    with (
        Cluster(folder, SLOTS) as cluster,
        Client(cluster.url, patience_s=0, timeout_s=5) as client,
    ):
        run = ChaosRun(options, cluster, client, console)
        try:
            run.run()
            invariants.check_histories(cluster.redis_url)
        except AssertionError as violation:  # a ViolationError is one
            run.figures.violation = str(violation)

    def orphans() -> list[psutil.Process]:
        return [process for node in cluster.nodes.values() for process in node.left_over()]

    with contextlib.suppress(RetryError):  # an agent's end ends them a moment later
        until(lambda: not orphans(), timeout_s=_GONE_WITHIN_S)
    if run.figures.violation is None and (left := orphans()):
        run.figures.violation = f"processes were left over: {left}"
    return run.figures


def _wait() -> None:
    threading.Event().wait(_LOOK_EVERY_S)
