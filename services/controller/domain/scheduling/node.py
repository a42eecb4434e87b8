"""A node: it joins, its lease lives or is over, it leaves. Suspicion is not death."""

from dataclasses import dataclass
from typing import Final

from pydantic import Field

from fsdp_core.plan.model import NodeFacts
from services.contract.messages.facts import Inventory, NodeJoined, NodeLeaving, NodeLeft
from services.contract.messages.probing import DeviceType, NodeMeasured
from services.contract.redis.redis_keys import NODE_LEASE_MS
from services.contract.words.ids import NodeId
from services.contract.words.states import NodeState
from services.controller.domain.record import Record

LOST_NODE_KEPT_MS: Final = 7 * 86_400_000
_BREAK_MS: Final = 5_000
_GONE_WITHIN_MS: Final = 60_000
"""An agent that still renews its lease so long after it should have gone did not say itself that it goes."""


class Drain(Record):
    """A request that a node be empty: running gangs get ``grace_s`` to checkpoint."""

    grace_s: float = 60.0
    asked_ms: int


class Measurement(Record):
    """What a node's devices of one type were found to do, or why that is not known."""

    facts: NodeFacts | None = None
    failure: str | None = None
    at_ms: int


class Node(Record):
    """What is known of a node. ``fact_id`` is the newest join or leave that was heeded.

    ``joins`` is the number of its incarnation's newest join. ``lost_ms``: since when it is LOST. ``left``: its agent said farewell. Its lease lives on for seconds, until its ranks are gone, and only
    another join makes it a node again; one whose lease still lives a minute later has not left. ``drain`` is kept beside this record, by people's hands
    alone: whatever the node or the controller does, it stands until somebody takes it back.
    ``leaving``: the same, asked for by this life of its agent, which is to end.
    ``measured``, by type of device, is kept beside it too: machines outlive their agents.
    """

    id: NodeId
    state: NodeState
    incarnation: str
    inventory: Inventory
    joined_ms: int
    fact_id: str
    joins: int = 0
    left: bool = False
    lost_ms: int | None = None
    leaving: Drain | None = None
    drain: Drain | None = Field(default=None, exclude=True)
    measured: dict[DeviceType, Measurement] = Field(default_factory=dict, exclude=True)

    @property
    def shown_state(self) -> NodeState:
        """Its state as people see it."""
        is_draining = self.state == NodeState.READY and self.emptying is not None
        return NodeState.DRAINING if is_draining else self.state

    @property
    def emptying(self) -> Drain | None:
        """Why it takes no gangs and those that run there are to move; None: it takes some."""
        return self.drain or self.leaving


@dataclass(frozen=True)
class Lease:
    """A lease that lives: of which life of the agent, and for how many milliseconds more."""

    incarnation: str
    left_ms: int


@dataclass(frozen=True)
class Watch:
    """Since when Redis has answered without a break, and when it did last, by its own clock."""

    since_ms: int
    last_ms: int

    @property
    def healthy_ms(self) -> int:
        """For how long."""
        return self.last_ms - self.since_ms

    def after(self, now_ms: int) -> "Watch":
        """The watch after another answer.

        A long break (this process was stopped, say) hides what Redis did; so does a clock that was
        set back.
        """
        is_broken = not 0 <= now_ms - self.last_ms <= _BREAK_MS
        return Watch(now_ms if is_broken else self.since_ms, now_ms)


def join(known: Node | None, fact: NodeJoined, fact_id: str) -> Node:
    """The node after an agent joined; a fact that is not newer than the last one is void."""
    if known is not None and not _is_newer(fact_id, known.fact_id):
        return known
    is_new_life = known is None or known.incarnation != fact.incarnation
    return Node(
        id=fact.node_id,
        state=NodeState.READY,
        incarnation=fact.incarnation,
        inventory=fact.inventory,
        joined_ms=_time(fact_id) if known is None or is_new_life else known.joined_ms,
        fact_id=fact_id,
        joins=fact.number,
        leaving=None if known is None or is_new_life else known.leaving,
        drain=None if known is None else known.drain,
        measured={} if known is None else known.measured,
    )


def is_new_word(known: Node | None, fact: NodeJoined, fact_id: str) -> bool:
    """Whether the agent that was there says again what it runs; a fact may be written twice."""
    if known is None or known.incarnation != fact.incarnation:
        return False
    return fact.number > known.joins and _is_newer(fact_id, known.fact_id)


def set_out(known: Node, fact: NodeLeaving, fact_id: str) -> Node:
    """The node after its agent was told to stop; of an earlier life, or repeated, it is void."""
    if known.incarnation != fact.incarnation or not _is_newer(fact_id, known.fact_id):
        return known
    leaving = Drain(grace_s=fact.grace_s, asked_ms=_time(fact_id))
    return known.model_copy(update={"leaving": leaving, "fact_id": fact_id})


def leave(known: Node, fact: NodeLeft, fact_id: str) -> Node:
    """The node after its agent said farewell; of an earlier life, or repeated, it is void."""
    if known.incarnation != fact.incarnation or not _is_newer(fact_id, known.fact_id):
        return known
    lost = {"state": NodeState.LOST, "fact_id": fact_id, "left": True, "lost_ms": _time(fact_id)}
    return known.model_copy(update=lost)


def measurement(fact: NodeMeasured, at_ms: int) -> Measurement:
    """What a node told of its devices at ``at_ms``."""
    return Measurement(facts=fact.facts, failure=fact.failure, at_ms=at_ms)


def judge(known: Node, lease: Lease | None, healthy_ms: int, now_ms: int) -> Node:
    """The node in the light of its lease.

    Args:
        known: The node.
        lease: The lease that lives, if any.
        healthy_ms: For how long Redis has answered without a break. A lease that ran out while
            Redis was away proves nothing: its agent could not renew it.
        now_ms: The present.
    """
    if known.state == NodeState.LOST and known.lost_ms is None:
        known = known.model_copy(update={"lost_ms": now_ms})  # an older version did not say
    if lease is not None and lease.incarnation == known.incarnation:
        known = _stayed(known, now_ms)
    if known.left:
        return known
    if lease is not None:
        if known.state == NodeState.LOST and lease.incarnation == known.incarnation:
            return known.model_copy(update={"state": NodeState.READY, "lost_ms": None})
        return known
    if known.state != NodeState.LOST and healthy_ms >= NODE_LEASE_MS:
        return known.model_copy(update={"state": NodeState.LOST, "lost_ms": now_ms})
    return known


def _stayed(known: Node, now_ms: int) -> Node:
    """The node, whose agent lives, without what was said of its going that did not come true."""
    if known.left and now_ms > (known.lost_ms or 0) + _GONE_WITHIN_MS:
        return known.model_copy(update={"left": False})
    leaving = known.leaving
    if leaving is not None and not known.left:
        gone_ms = leaving.asked_ms + leaving.grace_s * 1000 + _GONE_WITHIN_MS
        return known if now_ms <= gone_ms else known.model_copy(update={"leaving": None})
    return known


def is_forgettable(known: Node, now_ms: int) -> bool:
    """Whether it was lost so long ago that it is forgotten.

    Not one that is to be drained: its machine may come back, and must still be empty then.
    """
    is_lost = known.state == NodeState.LOST and known.lost_ms is not None
    return is_lost and known.drain is None and now_ms - (known.lost_ms or 0) > LOST_NODE_KEPT_MS


def _is_newer(fact_id: str, other: str) -> bool:
    return _order(fact_id) > _order(other)


def _order(fact_id: str) -> tuple[int, int]:
    time_ms, _, number = fact_id.partition("-")
    return int(time_ms), int(number or 0)


def _time(fact_id: str) -> int:
    return _order(fact_id)[0]
