"""Where telemetry of jobs is in Redis: with a secret, where only those who were told can find it."""

import hashlib
import hmac
from typing import Final

from services.contract.messages.commands import (
    CloseRecords,
    Command,
    LaunchGang,
    RecallRecords,
)
from services.contract.redis import redis_keys as keys

_HEX_DIGITS: Final = 32


class TelemetryNames:
    """What agents write of a job has these names in place of the job's id.

    Redis can allow an agent a pattern of keys, and not the jobs of one node. So with a secret each job's
    names have a part that is derived from it by HMAC-SHA256 (RFC 2104), and commands tell it to the agents that need it.

    Args:
        secret: The same of all controllers; empty: the names are the jobs' ids.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode()

    def of(self, job_id: str) -> str:
        """Of what the ranks report."""
        return keys.telemetry_name(job_id, self._part(job_id, "reported"))

    def recalled(self, job_id: str) -> str:
        """Of what is brought back from storage, by any agent: it learns no more than this."""
        return keys.telemetry_name(job_id, self._part(job_id, "recalled"))

    def told(self, command: Command) -> Command:
        """The command with what its agent must know."""
        match command:
            case LaunchGang() | CloseRecords():
                part = self._part(command.job_id, "reported")
            case RecallRecords():
                part = self._part(command.job_id, "recalled")
            case _:
                return command
        return command.model_copy(update={"telemetry_secret": part})

    def keys(self, job_id: str) -> list[str]:
        """All keys of a job on the server that has telemetry: what agents write, and what is brought back.

        Those from before a secret was set are among them.
        """
        names = {job_id: job_id, self.of(job_id): self.recalled(job_id)}
        return [
            key
            for reported, recalled in names.items()
            for key in (
                keys.job_ranks(reported),
                keys.job_steps(reported),
                keys.job_metrics(reported),
                keys.job_logs(reported),
                keys.job_records(reported),
                keys.recalled(recalled),
                keys.recalled_steps(recalled),
                keys.recalled_metrics(recalled),
                keys.recalled_logs(recalled),
                keys.recalled_events(recalled),
            )
        ]

    def _part(self, job_id: str, what: str) -> str:
        if not self._secret:
            return ""
        digest = hmac.new(self._secret, f"{job_id} {what}".encode(), hashlib.sha256)
        return digest.hexdigest()[:_HEX_DIGITS]


PLAIN_NAMES: Final = TelemetryNames()
