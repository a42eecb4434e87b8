"""What the chaos tests share: their jobs, and the check after each of them."""

from collections.abc import Callable

import redis

from services.contract.states import JobState
from services.contract.views import JobView
from tests.chaos import invariants
from tests.cluster import PATIENCE_S, Cluster
from tests.waiting import until

Losses = dict[int, float | None]
STEPS = 300
LONG = {
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 50},
    "faults": {"max_restarts": 8},
}


def finish(cluster: Cluster, job_id: str, undisturbed: Losses) -> JobView:
    """See the job to its end; whatever was done to it, nothing may be lost or done twice."""
    done = cluster.rested(job_id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    assert cluster.losses(job_id) == undisturbed
    check(cluster, job_id)
    return done


def check(cluster: Cluster, job_id: str) -> None:
    """The invariants of one job."""
    attempts = cluster.client.attempts(job_id).items
    with redis.Redis.from_url(cluster.redis_url, decode_responses=True) as server:
        invariants.check_steps(invariants.step_records(server, job_id), attempts)
    invariants.check_attempts(attempts)
    invariants.check_events(cluster.client.events(job_id).items)
    invariants.check_chain(cluster.chain(job_id), job_id)


def eventually(condition: Callable[[], object]) -> None:
    """Return once it holds."""
    until(lambda: bool(condition()), timeout_s=PATIENCE_S)
