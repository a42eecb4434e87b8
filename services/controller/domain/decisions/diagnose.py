"""The verdict on an attempt: which rank was first in trouble, of what kind, and what to do.

The one home of that judgement. It is made of facts alone: how ranks ended (``of_end``), or what
an agent found when it looked into live ones (``of_findings``).

Of ranks that stand still the first of these that holds decides:

1. a stopped process is frozen;
2. a rank that lost a thread, because memory was refused, waits for what that thread would have done;
3. an awake process whose pulse stands still never gives the interpreter's lock back;
4. where the kernel gets no acknowledgement from another node of the gang, the link to it is broken;
5. a rank that fetches data while the others wait for it in a collective has a stalled source;
6. a rank that waits in no collective while others do hangs in code of its own;
7. all wait, each in a collective: they have started different ones. Where not every node has
   told, the one that they wait for may be on another.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from services.contract.messages.facts import AGENT_DIED, OLDER_COPY, ExitStanding
from services.contract.messages.findings import RankFinding
from services.contract.words.states import ExitReason, FailureClass
from services.controller.domain.decisions.links import broken_links, in_words
from services.controller.domain.job.attempt import Attempt, Diagnosis, Failure, NodeFindings

NON_FINITE_LOSS: Final = "services.worker.rank.loop.context.NonFiniteLossError"
_CHECKPOINT_WRITE: Final = "services.worker.rank.checkpoints.writer.CheckpointWriteError"
# Under these names agents of version 0.1 tell of the two.
_FORMER_NON_FINITE_LOSS: Final = "services.worker.rank.step.NonFiniteLossError"
_FORMER_CHECKPOINT_WRITE: Final = "services.worker.rank.checkpoint_writer.CheckpointWriteError"
_DESYNC: Final = "fsdp_core.errors.DesyncError"
_MEMORY_TYPES: Final = frozenset({"builtins.MemoryError", "torch.OutOfMemoryError"})
_MEMORY_WORDS: Final = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "refused memory",
    "std::bad_alloc",
)
_PROCESS_WORDS: Final = ("can't start new thread", "resource temporarily unavailable")
_PULSE_LOST_S: Final = 2.0
_STILL_S: Final = 2.0
_COLLECTIVE_CODE: Final = ("torch/distributed/", "fsdp_core/comm/", "worker/rank/gang/control.py")
_FRAMES_LOOKED_AT: Final = 6
_STOPPED: Final = frozenset("Tt")
_ASLEEP_IN_THE_KERNEL: Final = "D"
_EVIDENCE_BYTES: Final = 64 << 10
_BY_HAND: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_ENDS_AS_ASKED: Final = frozenset(
    {
        ExitReason.COMPLETED,
        ExitReason.PAUSED,
        ExitReason.CANCELLED,
        ExitReason.PREEMPTED,
        ExitReason.NODE_DRAINED,
        ExitReason.RESIZED,
    }
)

_ADVICE: Final = {
    FailureClass.CRASH: "Read the rank's log and stacks: native code crashed, or the process "
    "exited. If it happens again, run the same step with one rank under a "
    "debugger.",
    FailureClass.OUT_OF_MEMORY: "Lower train.micro_batch or the sequence length, shard over more "
    "ranks, raise resources.memory_gib where it is the limit, or use nodes with more memory.",
    FailureClass.FROZEN: "The process was stopped (SIGSTOP, a debugger, a frozen control group): "
    "continue it, or check what else runs on that node.",
    FailureClass.GIL_HELD: "A C extension does not return and does not release the interpreter's "
    "lock (GIL): see the innermost frame, and make that call release the "
    "lock or time out.",
    FailureClass.COLLECTIVE_MISMATCH: "Run every unit on every rank, in one order: a branch that "
    "only some ranks take must not skip a unit or a collective.",
    FailureClass.DATA_STALL: "The data source does not return on that rank: check the storage or "
    "service that it reads from, and give its reads a timeout.",
    FailureClass.NAN: "Lower the learning rate, clip gradients, compute in fp32 or bf16, or check "
    "the data of this step. faults.on_nan: rollback retries once from the last "
    "checkpoint.",
    FailureClass.NODE_LOST: "The node or its agent is lost: check the machine. The job continues "
    "from its last committed checkpoint on other nodes.",
    FailureClass.NETWORK: "The agents of both nodes reach Redis, and their ranks do not reach each other: check "
    "cables, routes and firewalls between these addresses, and MESHLOOM_INTERFACE on both nodes.",
    FailureClass.KILLED_BY_OPERATOR: "A signal from outside ended the process, and nothing shows "
    "that memory ran out: a person, or a program that watches the "
    "node, sent it.",
    FailureClass.USER_ERROR: "The job's code raised the exception: see the last frame of yours in "
    "the traceback.",
    FailureClass.HANG: "The rank does not return from the frame shown. If the code may take this "
    "long, raise faults.hang_timeout_s.",
    FailureClass.LAUNCH_FAILED: "The node could not start the ranks: see the log of its agent.",
    FailureClass.CHECKPOINT_FAILED: "Check the storage of checkpoints: is it full, is it mounted?",
    FailureClass.NONE: "Nothing needs to be done.",
}

_PREVENTED: Final = (
    "{what}: free space there, or repair the node; the job then continues by itself, and no "
    "restart is counted."
)


def of_end(attempt: Attempt, reason: ExitReason, failure: Failure | None) -> Diagnosis | None:
    """The verdict on an attempt that is over; None where it ended as it should.

    Args:
        attempt: With its exits and what was found before it was killed.
        reason: Why it ended.
        failure: The first rank to fail, if any did.
    """
    if reason in _ENDS_AS_ASKED:
        return None
    if reason == ExitReason.KILLED:
        return _diagnosis(
            FailureClass.KILLED_BY_OPERATOR, "the job was killed on request", advice="As asked."
        )
    if attempt.hang and attempt.lost is None and attempt.refusal is None:
        return of_findings(attempt.hang, attempt.world_size, attempt.addresses)
    kind = classify(attempt, failure)
    evidence = [_told_by(failure)] if failure is not None and failure.rank is not None else []
    if attempt.lost is not None:
        evidence.append(attempt.lost)
    if attempt.oom_kills:
        evidence.append(f"the kernel killed {attempt.oom_kills} process(es): out of memory")
    evidence += [
        f"rank {entry.exit.rank}: {_first_line(entry.exit.error)}"
        for entry in sorted(attempt.exits, key=lambda e: e.exit.order)
        if entry.exit.error and (failure is None or entry.exit.rank != failure.rank)
    ]
    return _diagnosis(
        kind,
        _summary(kind, attempt, failure),
        rank=None if failure is None else failure.rank,
        node_id=None if failure is None else failure.node_id,
        evidence=evidence,
        advice=_PREVENTED.format(what=attempt.condition)
        if attempt.was_prevented(failure) and attempt.condition != OLDER_COPY
        else None,
    )


def classify(attempt: Attempt, failure: Failure | None) -> FailureClass:
    """Of what kind the failure is that ended an attempt."""
    if failure is None:
        return FailureClass.CHECKPOINT_FAILED
    if failure.rank is None or failure.error == AGENT_DIED:
        is_refused = attempt.refusal is not None and failure.rank is None
        return FailureClass.LAUNCH_FAILED if is_refused else FailureClass.NODE_LOST
    if failure.standing == ExitStanding.ECHO and len(attempt.incarnations) > 1:
        return FailureClass.NETWORK  # ranks lost each other, and none of them failed
    if failure.traceback is not None:
        return _of_exception(failure)
    if failure.signal is not None:
        return _of_signal(failure, attempt.oom_kills)
    return FailureClass.CRASH


def lacks_processes(failure: Failure) -> bool:
    """Whether the system refused a process or thread: others of the same user may have had them all."""
    words = (failure.error or "").lower()
    return any(word in words for word in _PROCESS_WORDS)


def of_findings(
    parts: Sequence[NodeFindings],
    world_size: int,
    addresses: Mapping[str, Sequence[str]] | None = None,
) -> Diagnosis:
    """The verdict on ranks that live, or lived when they were looked into.

    Args:
        parts: What each node told; at least one.
        world_size: How many ranks the attempt has on all nodes.
        addresses: By node, those by which its ranks connect to those of others, where known.
    """
    ranks = sorted((r for part in parts for r in part.findings.ranks), key=lambda r: r.rank)
    still_s = min(part.findings.still_s for part in parts)
    evidence = [_standing(rank) for rank in ranks]
    # Asked while all is well, or before it is known that it is not.
    asked = all(part.findings.why == "asked" for part in parts)
    if asked and still_s < _STILL_S and not _stopped(ranks):
        return _diagnosis(FailureClass.NONE, "the ranks make progress", evidence=evidence)
    links = broken_links(parts, addresses or {})
    unable = _unable(ranks)
    if links and unable is None:
        evidence = [*(link.evidence for link in links), *evidence]
        what = f"no rank made progress for {still_s:.1f} s: {in_words(links)}"
        return _diagnosis(FailureClass.NETWORK, what, evidence=evidence)
    kind, rank, what = unable or _of_standstill(ranks, is_whole=len(ranks) == world_size)
    nodes = {r.rank: part.node_id for part in parts for r in part.findings.ranks}
    # The others may go on: what a script runs need not wait for each other.
    how_long = f"for {still_s:.1f} s" if kind is FailureClass.FROZEN else None
    return _diagnosis(
        kind,
        f"{what} {how_long}" if how_long else f"no rank made progress for {still_s:.1f} s: {what}",
        rank=rank,
        node_id=None if rank is None else nodes[rank],
        evidence=evidence,
    )


def behind(ranks: Sequence[RankFinding]) -> tuple[int, ...]:
    """The ranks that have issued fewer collectives of a group than another rank of it."""
    foremost: dict[str, int] = {}
    for rank in ranks:
        for group, number in rank.issued.items():
            foremost[group] = max(foremost.get(group, 0), number)
    return tuple(
        rank.rank
        for rank in ranks
        if any(number < foremost[group] for group, number in rank.issued.items())
    )


def _of_standstill(
    ranks: Sequence[RankFinding], *, is_whole: bool
) -> tuple[FailureClass, int | None, str]:
    # A rank that did not answer waits for nothing that could be seen.
    own = [r for r in ranks if not _waits_in_a_collective(r)]
    late = behind(ranks)
    own.sort(key=lambda r: (r.rank not in late, r.rank))
    fetching = [r for r in own if r.phase == "DATA"]
    if fetching:
        one = fetching[0]
        return FailureClass.DATA_STALL, one.rank, f"rank {one.rank} waits for its data{_at(one)}"
    if own:
        one = own[0]
        return FailureClass.HANG, one.rank, f"rank {one.rank} does not return{_at(one)}"
    if is_whole and len(ranks) > 1:
        what = "every rank waits in a collective, and not in the same one"
        return FailureClass.COLLECTIVE_MISMATCH, late[0] if late else None, what
    what = "all inspected ranks wait in collectives, for a rank that was not inspected"
    return FailureClass.HANG, None, what


def _unable(ranks: Sequence[RankFinding]) -> tuple[FailureClass, int, str] | None:
    """A rank that cannot go on, whatever the others do; None: there is none."""
    for rank in _stopped(ranks):
        return FailureClass.FROZEN, rank.rank, f"the process of rank {rank.rank} is stopped"
    for rank in ranks:
        if rank.lost_thread:
            what = f"a thread of rank {rank.rank} ended because the system refused memory"
            return FailureClass.OUT_OF_MEMORY, rank.rank, what
    for rank in ranks:
        if _holds_the_lock(rank):
            what = f"rank {rank.rank} holds the interpreter's lock (GIL){_at(rank)}"
            return FailureClass.GIL_HELD, rank.rank, what
    return None


def _stopped(ranks: Sequence[RankFinding]) -> list[RankFinding]:
    return [rank for rank in ranks if rank.process in _STOPPED]


def _holds_the_lock(rank: RankFinding) -> bool:
    if rank.pulse_age_s is None or rank.process == _ASLEEP_IN_THE_KERNEL:
        return False
    return rank.pulse_age_s > _PULSE_LOST_S and bool(rank.process)


def _waits_in_a_collective(rank: RankFinding) -> bool:
    innermost = rank.frames[:_FRAMES_LOOKED_AT]
    return any(place in frame for frame in innermost for place in _COLLECTIVE_CODE)


def _of_exception(failure: Failure) -> FailureClass:
    names = set(failure.error_types)
    if not names.isdisjoint({NON_FINITE_LOSS, _FORMER_NON_FINITE_LOSS}):
        return FailureClass.NAN
    if _DESYNC in names:
        return FailureClass.COLLECTIVE_MISMATCH
    if not names.isdisjoint({_CHECKPOINT_WRITE, _FORMER_CHECKPOINT_WRITE}):
        return FailureClass.CHECKPOINT_FAILED
    if names & _MEMORY_TYPES or _lacks_memory(failure):
        return FailureClass.OUT_OF_MEMORY
    if "builtins.KeyboardInterrupt" in names:
        return FailureClass.KILLED_BY_OPERATOR
    return FailureClass.USER_ERROR


def _of_signal(failure: Failure, oom_kills: int) -> FailureClass:
    if failure.signal == signal.SIGKILL and oom_kills:
        return FailureClass.OUT_OF_MEMORY
    if failure.signal == signal.SIGABRT and _lacks_memory(failure):
        return FailureClass.OUT_OF_MEMORY
    return FailureClass.KILLED_BY_OPERATOR if failure.signal in _BY_HAND else FailureClass.CRASH


def _lacks_memory(failure: Failure) -> bool:
    words = (failure.error or "").lower()
    return any(word in words for word in _MEMORY_WORDS)


def _summary(kind: FailureClass, attempt: Attempt, failure: Failure | None) -> str:
    if failure is None:
        return "the last checkpoint was not committed"
    if failure.rank is None:
        return failure.error or attempt.lost or "the attempt was lost"
    if kind is FailureClass.NETWORK:
        nodes = ", ".join(attempt.incarnations)
        met = "lost" if attempt.first_step is not None else "did not find or lost"
        return (
            f"ranks on {nodes} {met} each other, and none had failed: rank {failure.rank} on "
            f"{failure.node_id}: {_told(failure)}"
        )
    return f"rank {failure.rank} failed first ({kind}): {_told(failure)}"


def _told_by(failure: Failure) -> str:
    return (
        f"rank {failure.rank}: {_told(failure)}, in phase {failure.phase} after step {failure.step}"
    )


def _told(failure: Failure) -> str:
    if failure.error is not None:
        return _first_line(failure.error)
    return f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0][:300]


def _at(rank: RankFinding) -> str:
    return f", at {rank.frames[0]}" if rank.frames else ""


def _standing(rank: RankFinding) -> str:
    unit = f" of {rank.unit}" if rank.unit else ""
    groups = "".join(
        f", {group} {number} issued and {rank.completed.get(group, 0)} waited for"
        for group, number in rank.issued.items()
    )
    pulse = "" if rank.pulse_age_s is None else f", pulse {rank.pulse_age_s:.1f} s ago"
    return (
        f"rank {rank.rank}: {rank.phase}{unit} after step {rank.step}{groups}; moved "
        f"{rank.still_s:.1f} s ago, process {rank.process or 'gone'}{pulse}{_at(rank)}"
    )


def _diagnosis(
    kind: FailureClass,
    summary: str,
    *,
    rank: int | None = None,
    node_id: str | None = None,
    evidence: Sequence[str] = (),
    advice: str | None = None,
) -> Diagnosis:
    return Diagnosis(
        verdict=kind,
        rank=rank,
        node_id=node_id,
        summary=summary,
        evidence=_as_far_as_there_is_room(evidence),
        advice=advice or _ADVICE[kind],
    )


def _as_far_as_there_is_room(evidence: Sequence[str]) -> tuple[str, ...]:
    """The first lines, and how many there are besides: the record of a job keeps them of each attempt."""
    sizes = accumulate(len(json.dumps(line)) for line in evidence)
    kept = sum(total <= _EVIDENCE_BYTES for total in sizes)
    more = len(evidence) - kept
    return (*evidence[:kept], f"and {more} more") if more else tuple(evidence)
