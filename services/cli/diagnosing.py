"""Inspecting the ranks of a running job, and waiting for the diagnosis."""

from datetime import datetime
from typing import Final

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from meshloom.client import RestClient as Client
from services.cli.errors import CliError, RefusedError
from services.contract.api.views import DiagnosisView

_ANSWERED_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.2
_NOT_FOUND: Final = 404


def looked_into(client: Client, job_id: str) -> DiagnosisView:
    """The verdict on the ranks as they are now.

    Raises:
        RefusedError: No rank of the job lives.
        CliError: The agents did not answer.
    """
    known = _newest(client, job_id)
    client.diagnose(job_id)

    def look() -> DiagnosisView | None:
        found = _newest(client, job_id)
        return found if found is not None and _moment(found) != _moment(known) else None

    tries = Retrying(
        retry=retry_if_result(lambda result: result is None),
        wait=wait_fixed(_LOOK_EVERY_S),
        stop=stop_after_delay(_ANSWERED_WITHIN_S),
        retry_error_callback=lambda _: None,
    )
    found = tries(look)
    if found is None:
        raise CliError(
            f"no agent answered within {_ANSWERED_WITHIN_S:.0f} s; is its node alive? "
            "`meshloom nodes` tells"
        )
    return found


def _newest(client: Client, job_id: str) -> DiagnosisView | None:
    try:
        return client.diagnosis(job_id)
    except RefusedError as error:
        if error.problem.status != _NOT_FOUND:
            raise
        return None


def _moment(diagnosis: DiagnosisView | None) -> datetime | None:
    return None if diagnosis is None else diagnosis.at
