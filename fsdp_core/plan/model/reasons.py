"""Why a layout was not chosen, in words and figures."""

from __future__ import annotations

from dataclasses import asdict

from fsdp_core.plan.model.answer import Candidate
from fsdp_core.plan.model.best_first import Found
from fsdp_core.plan.model.ledger import Peak
from fsdp_core.plan.model.question import Seats
from fsdp_core.plan.model.score import Spent, near_and_far

_WORDS = {
    "parameters": "slices of parameters",
    "buffers": "buffers",
    "gradients": "gradients of slices",
    "optimizer": "the optimizer",
    "unsharded": "whole parameters",
    "whole_gradients": "whole gradients",
    "activations": "activations",
    "communication": "buffers of collectives",
    "workspace": "what operators take within themselves",
}
_AXES = {
    "tp": "sums over tp",
    "dp_shard": "gathers and reductions over dp_shard",
    "dp_replicate": "averages over dp_replicate",
}


def why_lost(found: Found, best: Found, seats: Seats) -> str:
    """What speaks against `found` where `best` was chosen, or is closest to fitting."""
    mine, chosen = found.candidate, best.candidate
    if not mine.fits:
        return does_not_fit(mine, seats)
    if found.score > best.score:
        return _slower(mine, chosen, seats)
    if found.score < best.score:
        return "not clearly faster"
    more = _total(mine) - _total(chosen)
    same = "equal time" if seats.node is not None else "equal operations and bytes"
    if more > 0:
        return f"{same}, {gib(more)} more memory"
    return f"{same} and memory: the simpler one is taken"


def does_not_fit(candidate: Candidate, seats: Seats) -> str:
    """How much is missing, and what takes most at the peak."""
    peak = candidate.estimate.peak
    return (
        f"does not fit: needs {gib(peak.memory.total)} of {gib(seats.memory)}, "
        f"most of it {_most(peak)} {_place(peak)}"
    )


def gib(nbytes: int) -> str:
    """Bytes, for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size // 10:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def _most(peak: Peak) -> str:
    held = asdict(peak.memory)
    return _WORDS[max(held, key=lambda kind: held[kind])]


def _place(peak: Peak) -> str:
    if peak.where not in ("forward", "backward"):
        return f"in the {peak.where}"
    return f"in {peak.unit}'s {peak.where}" if peak.unit else f"in the root's {peak.where}"


def _slower(mine: Candidate, chosen: Candidate, seats: Seats) -> str:
    time, best = mine.estimate.time, chosen.estimate.time
    if time is None or best is None:
        return _more(mine, chosen, seats)
    extra = {
        axis: time.communication[axis] - best.communication[axis] for axis in time.communication
    }
    extra["compute"] = time.compute - best.compute + time.engine - best.engine
    extra["optimizer"] = time.optimizer - best.optimizer
    where = max(extra, key=lambda part: extra[part])
    ratio = f"{time.total / best.total:.2f} x" if time.total / best.total >= 1.005 else "slightly"  # noqa: PLR2004 - what two digits show
    return f"{ratio} slower: {_cause(where, mine, chosen, seats)}"


def _cause(where: str, mine: Candidate, chosen: Candidate, seats: Seats) -> str:
    if where == "compute":
        return _more_work(mine, chosen)
    if where == "optimizer":
        return "each rank updates more"
    sent, best = mine.estimate.sent[where], chosen.estimate.sent[where]
    if sent and _is_far(where, mine, seats) and not _is_far(where, chosen, seats):
        return f"{_AXES[where]} go between nodes, {gib(sent)} a step"
    if sent > best:
        return f"{_AXES[where]} send {gib(sent)} a step, not {gib(best)}"
    started, fewer = mine.estimate.collectives[where], chosen.estimate.collectives[where]
    if started > fewer:
        return f"{_AXES[where]}: {started} collectives, not {fewer}"
    return f"{_AXES[where]} send less of their bytes within nodes"


def _more_work(mine: Candidate, chosen: Candidate) -> str:
    if mine.accumulation > chosen.accumulation:
        return f"{mine.accumulation} passes a step, not {chosen.accumulation}"
    if mine.estimate.flops > chosen.estimate.flops:
        return "activations are computed again"
    return "a pass takes longer"


def _is_far(axis: str, candidate: Candidate, seats: Seats) -> bool:
    mesh = candidate.plan.mesh
    span = {"tp": mesh.tp, "dp_shard": mesh.tp * mesh.dp_shard, "dp_replicate": mesh.ranks}[axis]
    return span > seats.ranks_per_node


def _more(mine: Candidate, chosen: Candidate, seats: Seats) -> str:
    flops, least = mine.estimate.flops, chosen.estimate.flops
    if flops > least * 1.001:
        return f"{flops / least - 1:.0%} more operations: activations are computed again"
    (near, far), (best_near, best_far) = (_bytes(each, seats) for each in (mine, chosen))
    if far > best_far:
        return f"sends {gib(far)} a step between nodes, not {gib(best_far)}"
    return f"sends {gib(near)} a step within a node, not {gib(best_near)}"


def _bytes(candidate: Candidate, seats: Seats) -> tuple[int, int]:
    cost = candidate.estimate
    spent = Spent(cost.flops, cost.sent, cost.time, cost.sent_in_groups)
    return near_and_far(spent, candidate.plan.mesh, seats.ranks_per_node)


def _total(candidate: Candidate) -> int:
    return candidate.estimate.peak.memory.total
