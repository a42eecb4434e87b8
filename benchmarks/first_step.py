"""How long until the first step, and until the next one after a rank was killed.

    python -m benchmarks.first_step [--rounds 7] [--only planned]

Ours (a controller, an agent and Redis that run already, as they do) against
``torchrun --standalone`` with torch's own ``fully_shard``: the same decoder on two CPU ranks, in
turns on the same machine. Ours is counted from the POST, torchrun from its command; in each run
one rank is then killed with SIGKILL. Each figure is the median of the rounds with the lowest and
highest; a run without another step within ``--patience`` seconds is counted apart.

These run by the default layout. A job that leaves its layout open is planned first: that is
measured for a model that a node has not seen, for one that it has, and in a new home: on a node that
has measured itself while it was idle, and on one that begins to when the plan asks. Of each is said
how long the plan took, and how long the probe of the model, which is a part of it.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from services.contract.api.views import JobView
from tests.cluster import Cluster
from tests.parts import ROOT
from tests.waiting import until

_FIRST_WITHIN_S = 120.0
_SIZES = {"dim": 192, "layers": 6, "heads": 6}
_LENGTH = 128
_CLEAR_AFTER = 20
_MEASURED_WITHIN_S = 120.0
_PARTS = ("default", "planned")
Round = tuple[float, float | None]


class Planned(NamedTuple):
    """Seconds from the POST of a job whose layout is open."""

    first_step_s: float
    planned_s: float
    probe_s: float


def main() -> None:
    """Measures in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, help="these")
    wanted = parser.parse_args()
    ours: list[Round] = []
    theirs: list[Round] = []
    unseen, seen, measuring = [], [], []
    with _cluster({"MESHLOOM_MEASURE_IDLE_S": "2"}) as cluster:
        measured_s = _measured(cluster)
        very_first = _planned(cluster, _LENGTH)
        _ours(cluster, wanted.patience)
        for number in range(wanted.rounds):
            if "default" in wanted.only:
                ours.append(_ours(cluster, wanted.patience))
                theirs.append(_torchrun(cluster.folder / f"steps-{number}", wanted.patience))
            if "planned" in wanted.only:
                unseen.append(_planned(cluster, _LENGTH + 1 + number))
                seen.append(_planned(cluster, _LENGTH + 1 + number))
    for _ in range(wanted.rounds if "planned" in wanted.only else 0):
        with _cluster({}) as cluster:
            _ours(cluster, wanted.patience)  # the first one also waits for the warm process
            measuring.append(_planned(cluster, _LENGTH))
    if "default" in wanted.only:
        sys.stdout.write(_line("Meshloom", ours) + _line("torchrun", theirs))
    sys.stdout.write(f"an idle node has measured itself {measured_s:.1f} s after it joined\n")
    for name, found in (
        ("the first job of a new home", [very_first]),
        ("the same, and the node measures itself", measuring),
        ("a model not seen before", unseen),
        ("a known model", seen),
    ):
        sys.stdout.write(
            f"planned first, {name}: first step {_spread([each.first_step_s for each in found])}, "
            f"planned after {_spread([each.planned_s for each in found])}, "
            f"probe {_spread([each.probe_s for each in found])}\n"
        )
    sys.stdout.write(f"load of {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}\n")


@contextlib.contextmanager
def _cluster(node_settings: Mapping[str, str]) -> Iterator[Cluster]:
    """A controller, a node of two CPU ranks and Redis, with nothing in them."""
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-first-step-") as folder,
        Cluster(Path(folder), {"loom-1": 2}, node_settings) as cluster,
    ):
        yield cluster


def _measured(cluster: Cluster) -> float:
    """Seconds from a node's joining until it has measured itself."""

    def found() -> float | None:
        node = cluster.node_view("loom-1")
        known = node.measured.get("cpu")
        return None if known is None else (known.measured_at - node.joined_at).total_seconds()

    return until(found, timeout_s=_MEASURED_WITHIN_S, every_s=0.1)


def _submit(cluster: Cluster, plan: str, length: int) -> JobView:
    return cluster.submit(
        model={"factory": "decoder", "args": _SIZES},
        data={"factory": "stdlib_bytes", "args": {"seq_len": length}},
        train={"steps": 100_000, "global_batch": 4},
        checkpoint={"every_steps": 5},
        plan=plan,
    )


def _planned(cluster: Cluster, length: int) -> Planned:
    job = _submit(cluster, "auto", length)
    running = cluster.job_when(job.id, lambda job: job.progress.step >= 1)
    (first,) = cluster.client.attempts(job.id).items
    cluster.client.kill(job.id)
    cluster.rested(job.id)
    events = cluster.client.events(job.id).items
    planned = next(each for each in events if each.kind == "job.planned")
    plan_id = None if running.estimate is None else running.estimate.plan_id
    plan = cluster.client.get_plan(str(plan_id))
    began_at = first.first_step_at or datetime.now(UTC)
    return Planned(
        (began_at - running.created_at).total_seconds(),
        (planned.at - running.created_at).total_seconds(),
        0.0 if plan.probe.cached else plan.probe.took_s or 0.0,
    )


def _ours(cluster: Cluster, patience_s: float) -> Round:
    job = _submit(cluster, "default", _LENGTH)
    running = cluster.job_when(job.id, lambda job: job.progress.step >= _CLEAR_AFTER)
    (first,) = cluster.client.attempts(job.id).items
    victim = cluster.rank_pid(job.id, 1, attempt=1)
    killed_at = datetime.now(UTC)
    victim.kill()

    def restarted() -> float | None:
        attempts = cluster.client.attempts(job.id).items
        again = attempts[-1].first_step_at
        return (again - killed_at).total_seconds() if len(attempts) > 1 and again else None

    next_s = None
    with contextlib.suppress(Exception):
        next_s = until(restarted, timeout_s=patience_s, every_s=0.1)
    cluster.client.kill(job.id)
    cluster.rested(job.id)
    began_at = first.first_step_at or datetime.now(UTC)
    return (began_at - running.created_at).total_seconds(), next_s


def _torchrun(steps: Path, patience_s: float) -> Round:
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["--max-restarts=3", "-m", "benchmarks.torchrun_script", str(steps)]
    with subprocess.Popen(  # noqa: S603 our own script
        [*command, *script], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: _times(steps, 0)[_CLEAR_AFTER:], timeout_s=_FIRST_WITHIN_S, every_s=0.02)
            first_s = _times(steps, 0)[0] - began
            victim = next(p for p in psutil.Process(process.pid).children() if _is_rank(p, "1"))
            killed_at = time.time()
            victim.kill()
            next_s = None
            with contextlib.suppress(Exception):
                next_s = until(lambda: _times(steps, 1), timeout_s=patience_s)[0] - killed_at
            return first_s, next_s
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.send_signal(signal.SIGKILL)


def _is_rank(process: psutil.Process, rank: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK") == rank
    return False


def _times(steps: Path, restart: int) -> list[float]:
    """The moments of the steps of rank 0 after so many restarts."""
    try:
        lines = [line.split() for line in steps.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [float(at) for number, at in lines if int(number) == restart]


def _line(name: str, rounds: list[Round]) -> str:
    again = [next_s for _, next_s in rounds if next_s is not None]
    return (
        f"{name}: first step {_spread([first for first, _ in rounds])}; after kill -9 of a rank, "
        f"next first step {_spread(again)}, in {len(again)} of {len(rounds)} runs\n"
    )


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "never"
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
