"""Looks at a job all the time while it is being tormented, and remembers what it saw."""

import re
import time
from pathlib import Path
from typing import Final

import redis

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.contract.storage.manifests import Manifest
from services.contract.words.states import JobState
from tests.chaos import invariants
from tests.chaos.invariants import ViolationError
from tests.cluster import Cluster

_BETWEEN_LOOKS_S: Final = 1.0
_STEP_LINE: Final = re.compile(r"^step (\d+)/", re.MULTILINE)


class Watch:
    """The watch over one job.

    Args:
        cluster: Where it runs.
        client: One that does not wait for who is away.
        job_id: The job.
    """

    def __init__(self, cluster: Cluster, client: Client, job_id: str) -> None:
        self._cluster = cluster
        self._client = client
        self._job_id = job_id
        self._seen: dict[str, Manifest] = {}
        self._looked_at = 0.0

    def look(self) -> None:
        """Check what can be seen whoever is away; at most once a second.

        Raises:
            ViolationError: A promise was broken.
        """
        if time.monotonic() - self._looked_at < _BETWEEN_LOOKS_S:
            return
        self._looked_at = time.monotonic()
        chain = self._cluster.chain(self._job_id)
        linked = {r.checkpoint_id: r for r in chain.records() if isinstance(r, Manifest)}
        for name, manifest in self._seen.items():
            if linked.get(name) != manifest:
                raise ViolationError(f"committed checkpoint {name} has vanished")
        if linked.keys() != self._seen.keys():
            invariants.check_chain(chain, self._job_id)
            self._seen = linked
        self._check_status()

    def conclude(self) -> None:
        """Check all that holds of a job at rest.

        Raises:
            ViolationError: A promise was broken.
        """
        attempts = self._client.attempts(self._job_id).items
        with redis.Redis.from_url(self._cluster.redis_url, decode_responses=True) as server:
            invariants.check_steps(invariants.step_records(server, self._job_id), attempts)
        invariants.check_attempts(attempts)
        invariants.check_events(self._client.events(self._job_id, limit=1000).items)
        invariants.check_chain(self._cluster.chain(self._job_id), self._job_id)

    def _check_status(self) -> None:
        try:
            job = self._client.job(self._job_id)
            attempts = self._client.attempts(self._job_id).items
        except CliError:
            return  # whoever should answer is away
        invariants.check_attempts(attempts)
        if job.state is JobState.FAILED:
            raise ViolationError(f"the job failed: {job.reason}")
        # The chain is read after the answer: what was told must have been linked before.
        records = self._cluster.chain(self._job_id).records()
        linked = {r.checkpoint_id for r in records if isinstance(r, Manifest)}
        if job.latest_checkpoint is not None and job.latest_checkpoint not in linked:
            raise ViolationError(
                f"{job.latest_checkpoint} is told to be committed, and storage has no manifest"
            )


def logged_step(folder: Path, job_id: str) -> int:
    """The newest step that rank 0 wrote of, whoever can or cannot be reached."""
    logs = folder.glob(f"homes/*/nodes/*/jobs/{job_id}/attempt-*/rank-0.stdout.log")
    newest = max(logs, key=lambda log: int(log.parent.name.removeprefix("attempt-")), default=None)
    steps = [] if newest is None else _STEP_LINE.findall(newest.read_text())
    return max(map(int, steps), default=0)
