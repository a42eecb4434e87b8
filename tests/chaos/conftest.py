"""What the chaos tests share: their jobs, and the check after each of them.

How long things took is not asserted, for the machine may be busy: it is written into
``latencies.jsonl`` in the cluster's folder, one line a job.
"""

import json
from collections.abc import Callable
from pathlib import Path

import redis

from services.contract.api.views import JobView
from services.contract.words.states import JobState
from tests.chaos import invariants
from tests.chaos.invariants import Losses
from tests.cluster import PATIENCE_S, Cluster
from tests.e2e.conftest import tiny_spec
from tests.waiting import until

# Few steps at an easy pace: the time for faults is in the rests, which take no processor.
STEPS = 100
LONG = {
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 25},
    "faults": {"max_restarts": 8},
}


def paced(orders: Path, pace_s: float) -> dict[str, object]:
    """The decoder of the tiny job, at a pace that leaves time for faults, which it takes orders of.

    Compare its losses with its own, at whatever pace: a model that is no built-in one is split into
    other units, and from three ranks on gloo sums in another order for another layout.
    """
    sizes = tiny_spec()["model"]["args"]  # type: ignore[index]  # a dict of dicts
    arguments = {"orders": str(orders), "pace_s": pace_s, **sizes}
    return {"factory": "faulty_models:FaultyDecoder", "args": arguments}


def set_pace(orders: Path, pace_s: float) -> None:
    """Have the ranks of such a job rest for so long before each pass from now on."""
    draft = orders / "draft"
    draft.write_text(str(pace_s))
    draft.replace(orders / "pace")


def finish(cluster: Cluster, job_id: str, undisturbed: Losses, tolerance: float = 0.0) -> JobView:
    """See the job to its end, without further rests; nothing may be lost or done twice."""
    model = cluster.job(job_id).spec.model
    assert model is not None
    set_pace(Path(str(model.args["orders"])), 0.0)
    done = cluster.rested(job_id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    attempts = cluster.client.attempts(job_id).items
    losses, last = cluster.losses(job_id), len(undisturbed)
    invariants.check_losses(losses, undisturbed, attempts, last, tolerance)
    check(cluster, job_id)
    invariants.check_histories(cluster.redis_url)
    _record(cluster, job_id)
    return done


def check(cluster: Cluster, job_id: str) -> None:
    """The invariants of one job."""
    attempts = cluster.client.attempts(job_id).items
    with redis.Redis.from_url(cluster.redis_url, decode_responses=True) as server:
        invariants.check_steps(invariants.step_records(server, job_id), attempts)
    invariants.check_attempts(attempts)
    invariants.check_events(cluster.client.events(job_id).items)
    invariants.check_chain(cluster.chain(job_id), job_id)


def _record(cluster: Cluster, job_id: str) -> None:
    times = {"exit_reason", "time_to_detect_s", "time_to_restart_s", "time_to_first_step_s"}
    attempts = cluster.client.attempts(job_id).items
    line = {"job": job_id, "attempts": [a.model_dump(mode="json", include=times) for a in attempts]}
    with (cluster.folder / "latencies.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def eventually(condition: Callable[[], object]) -> None:
    """Return once it holds."""
    until(lambda: bool(condition()), timeout_s=PATIENCE_S)
