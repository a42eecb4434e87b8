"""What can go wrong, as errors that carry their HTTP status and a stable code.

::

    MeshloomError
    ├── InvalidRequestError      422  every fault at once
    ├── KeyReusedError           422  an Idempotency-Key came with another body
    ├── ForbiddenError           403  the token does not allow it
    ├── NotFoundError            404
    ├── StateConflictError       409  the state of the job or plan does not allow it
    │   └── TooManyJobsError     409  their owner has as many jobs as one may have
    ├── RecordUnreadableError    409  what is stored of the job cannot be read
    ├── PreconditionRequiredError 428  a change of a job says which revision it is made on
    ├── PreconditionFailedError  412  the job is not as the client saw it
    ├── CursorExpiredError       410  the stream was trimmed behind the cursor
    ├── BodyTooLargeError        413  an archive of code is larger than may be
    ├── RangeNotSatisfiableError 416  the range is behind the end of the file
    ├── TooManyUploadsError      503  as many archives are being sent as may
    ├── TooManyStreamsError      503  as many follow logs and events as may
    ├── TooManyOwnStreamsError   429  one subject follows as many as it may
    ├── StoreUnavailableError    503  Redis does not answer
    ├── StaleWriteError          409  somebody else changed the record first
    └── DeposedError             503  another controller leads now
"""

from collections.abc import Sequence

from services.contract.words.problems import Fault, first_faults


class MeshloomError(Exception):
    """Whatever the controller refuses or cannot do."""

    status = 500
    code = "internal_error"
    title = "Internal error"
    retry_after_s: int | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The single faults, where there are several."""
        return ()


class InvalidRequestError(MeshloomError):
    """The request says something that can never be done; ``faults`` name each place."""

    status = 422
    code = "invalid_request"
    title = "Invalid request"

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(first_faults(faults))
        super().__init__("; ".join(fault.detail for fault in self._faults))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Every fault of the request, as far as ``first_faults`` lists them."""
        return self._faults


class KeyReusedError(MeshloomError):
    """An ``Idempotency-Key`` was used before, for another request."""

    status = 422
    code = "idempotency_key_reused"
    title = "Idempotency-Key reused"


class ForbiddenError(MeshloomError):
    """Who asks is known, and may not: the scope is too small, or the resource has another owner."""

    status = 403
    code = "insufficient_scope"
    title = "Not allowed"

    def __init__(self, detail: str, *, code: str = "insufficient_scope") -> None:
        super().__init__(detail)
        self.code = code


class NotFoundError(MeshloomError):
    """There is no such resource."""

    status = 404
    code = "not_found"
    title = "Not found"


class StateConflictError(MeshloomError):
    """The state of a job, a plan or the nodes does not allow the request."""

    status = 409
    code = "state_conflict"
    title = "Not in this state"

    def __init__(self, detail: str, *, code: str = "state_conflict") -> None:
        super().__init__(detail)
        self.code = code


class TooManyJobsError(StateConflictError):
    """The owner of a job has as many as one may have."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, code="too_many_jobs")


def no_node(node_id: str) -> NotFoundError:
    """There is no such node."""
    return NotFoundError(f"there is no node {node_id}")


def no_plan(plan_id: str) -> NotFoundError:
    """There is no such plan, or none any more."""
    return NotFoundError(
        f"there is no plan {plan_id}; plans are kept for seven days, then made again"
    )


class RecordTooLongError(StateConflictError):
    """What is to be written has a text that Redis does not take: to write it again would fail again."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, code="record_too_long")


class PreconditionRequiredError(MeshloomError):
    """The request must say, by ``If-Match``, on which revision of the job it was made."""

    status = 428
    code = "precondition_required"
    title = "If-Match is required"


class PreconditionFailedError(MeshloomError):
    """The job was changed since the client read it."""

    status = 412
    code = "precondition_failed"
    title = "Changed meanwhile"


class RecordUnreadableError(MeshloomError):
    """What is stored of a job or plan cannot be read by this version."""

    status = 409
    code = "record_unreadable"
    title = "The record cannot be read"


class CursorExpiredError(MeshloomError):
    """The stream no longer holds what follows the cursor."""

    status = 410
    code = "cursor_expired"
    title = "The stream was trimmed"


class BodyTooLargeError(MeshloomError):
    """The body is larger than this request's may be."""

    status = 413
    code = "body_too_large"
    title = "Too large"


class RangeNotSatisfiableError(MeshloomError):
    """A range of bytes begins behind the end of the file."""

    status = 416
    code = "range_not_satisfiable"
    title = "Range not satisfiable"


class TooManyUploadsError(MeshloomError):
    """As many archives are being sent as this controller holds in memory."""

    status = 503
    code = "too_many_uploads"
    title = "Too many uploads"
    retry_after_s = 1


class TooManyStreamsError(MeshloomError):
    """As many streams are open as this controller serves; pages are still answered."""

    status = 503
    code = "too_many_streams"
    title = "Too many streams"
    retry_after_s = 5


class TooManyOwnStreamsError(MeshloomError):
    """One subject follows as many streams as its share is; pages are still answered."""

    status = 429
    code = "too_many_own_streams"
    title = "Too many streams of one subject"
    retry_after_s = 5


class StoreUnavailableError(MeshloomError):
    """Redis does not answer. A write may or may not have happened; repeating it is safe.

    Args:
        told: For everybody: strangers see it at ``/readyz``.
        why: For the log, with Redis's address; None: as ``told``.
    """

    status = 503
    code = "store_unavailable"
    title = "The store does not answer"
    retry_after_s = 1

    def __init__(self, told: str = "", why: str | None = None) -> None:
        super().__init__(told)
        self.why = told if why is None else why


class TelemetryUnavailableError(StoreUnavailableError):
    """The server that has telemetry does not answer. All else goes on without it."""


class RecordsAwayError(MeshloomError):
    """The job's curve and output are in storage, and no agent has brought them back yet."""

    status = 503
    code = "records_away"
    title = "The records are in storage"
    retry_after_s = 2


class StaleWriteError(MeshloomError):
    """The record changed since it was read; read again and decide again."""

    status = 409
    code = "stale_write"
    title = "Changed meanwhile"
    retry_after_s = 1


class DeposedError(MeshloomError):
    """Another controller took the lead: this one's decisions no longer count."""

    status = 503
    code = "deposed"
    title = "Another controller leads"
    retry_after_s = 1
