"""Ids of traces and spans that every controller derives alike, with nothing stored between them.

A job's ULID has as many bits as a trace id, so it is the id of the job's trace. The spans of job and
attempts are known before they end: commands name them as parents.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags

_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_chosen: ContextVar[SpanContext | None] = ContextVar("meshloom_span", default=None)


class ChosenIds(RandomIdGenerator):
    """Random ids, but for a span whose ids were chosen."""

    def generate_span_id(self) -> int:
        """The chosen id of the span that is made now; else a random one."""
        chosen = _chosen.get()
        return super().generate_span_id() if chosen is None else chosen.span_id

    def generate_trace_id(self) -> int:
        """The chosen id of the trace of a span without a parent; else a random one."""
        chosen = _chosen.get()
        return super().generate_trace_id() if chosen is None else chosen.trace_id


@contextlib.contextmanager
def chosen_ids(context: SpanContext) -> Iterator[None]:
    """Within, a span that is made has these ids."""
    token = _chosen.set(context)
    try:
        yield
    finally:
        _chosen.reset(token)


def context_of_job(job_id: str) -> SpanContext:
    """The span of a whole job."""
    return _context(job_id, "job")


def context_of_attempt(job_id: str, fence: int) -> SpanContext:
    """The span of one attempt."""
    return _context(job_id, f"attempt {fence}")


def _context(job_id: str, name: str) -> SpanContext:
    digest = hashlib.blake2b(f"{job_id} {name}".encode(), digest_size=8).digest()
    return SpanContext(
        trace_id=_number(job_id.partition("_")[2]),
        span_id=int.from_bytes(digest, "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _number(ulid: str) -> int:
    number = 0
    for letter in ulid:
        number = number << 5 | _DIGITS.index(letter)
    return number & (1 << 128) - 1
