"""Under which name telemetry of each job is in Redis, as its controller told this agent."""

from typing import Final

_MOST: Final = 10_000


class LearnedNames:
    """Names of the jobs that were launched here; of any other the job's id, as controllers without a secret have it."""

    def __init__(self) -> None:
        self._by_job: dict[str, str] = {}

    def learn(self, job_id: str, name: str) -> None:
        """Take the name of a job that is launched. Known are those of the 10 000 jobs that were launched or written last."""
        self._by_job.pop(job_id, None)
        self._by_job[job_id] = name
        if len(self._by_job) > _MOST:
            del self._by_job[next(iter(self._by_job))]

    def of(self, job_id: str) -> str:
        """The name of a job."""
        name = self._by_job.pop(job_id, None)
        if name is None:
            return job_id
        self._by_job[job_id] = name
        return name
