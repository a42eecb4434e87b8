"""``docs/lifecycle.md``, written from the table of states: what it says is what is decided."""

from typing import Final

from services.contract.words.states import TERMINAL_STATES, JobState
from services.controller.domain.job.job import RESUMABLE_STATES, SEVERITY
from services.controller.domain.job.lifecycle import EDGES

_HEAD: Final = """\
# A job's life

Written by `python -m tests.docs.generated_pages` from
`services/controller/domain/job/lifecycle.py`; a test compares the two. Every transition is one Lua script:
it compares the job's version, its fence and the leader's epoch, and writes the job, its
checkpoints, its events and the commands to agents, or nothing
([architecture.md](architecture.md), "Truths and their owners").
"""

_TAIL: Final = """\
## What else holds

- **Fences only grow.** Each attempt has the next number; a command, fact, vote or commit of a lower
  one is void.
- **At most one attempt is running**, and its slots are taken until its last rank has ended or its node
  is certainly lost.
- **A stop only gets more severe**: {severity}. A `move` (a migration) is requested by the controller: a gang
  that is preempted, whose node is drained, or that changes its size ([elastic.md](elastic.md)), takes a
  checkpoint, ends within its grace period and continues elsewhere or later, and no restart is counted.
  The state does not change until the ranks have ended; the reason says what happens. A stop may have a
  grace of hours: a gang of higher priority relies on each for a minute, then has others drained if they can make room.
- **Ended jobs** ({terminal}) change state only by the transitions above: {resumable} continue when a
  user resumes them, and a job that failed without its last commit succeeds when that commit is reported.
- **Only retention or deletion removes a committed checkpoint.** The newest one, the one from which an
  attempt resumed while there is no newer one, and those from which clones start are kept.
- **Facts are idempotent.** They arrive at least once; applying one again changes nothing.

`tests/controller/test_lifecycle_properties.py` tests these against random sequences of requests, facts,
repetitions, losses and looks of the reconciler.
"""


def lifecycle_page() -> str:
    """The page, whole."""
    parts = [_HEAD, "## The transitions\n", _diagram(), _table()]
    severity = " < ".join(sorted(SEVERITY, key=lambda kind: SEVERITY[kind]))
    parts.append(
        _TAIL.format(
            severity=severity,
            terminal=", ".join(sorted(TERMINAL_STATES)),
            resumable=" and ".join(sorted(RESUMABLE_STATES - {JobState.PAUSED})),
        )
    )
    return "\n".join(parts)


def _diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {JobState.QUEUED}"]
    lines += [f"  {edge.source} --> {edge.target}" for edge in EDGES]
    lines += [f"  {state} --> [*]" for state in JobState if state in TERMINAL_STATES]
    return "\n".join([*lines, "```", ""])


def _table() -> str:
    rows = [f"| {edge.source} | {edge.target} | {edge.cause} |" for edge in EDGES]
    return "\n".join(["| from | to | because |", "| --- | --- | --- |", *rows, ""])
