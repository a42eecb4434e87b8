"""Nodes and facts in Redis."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args

from redis.exceptions import ResponseError

from services.contract.messages.probing import DeviceType
from services.contract.messages.telemetry import MetricRecord, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.bounds import NAME_CHARACTERS
from services.controller.adapters.redis import machine_scripts
from services.controller.adapters.redis.connection import (
    MAX_BLOCK_S,
    RedisClients,
    answer_behind,
    answering,
)
from services.controller.domain.errors import (
    DeposedError,
    StaleWriteError,
    no_node,
)
from services.controller.domain.scheduling.node import Drain, Lease, Measurement, Node
from services.controller.ports.machines import Entry, FactEntry

# The consumer is the lead, not its holder: whoever takes it finds what the last holder
# left unacknowledged as its own, and no consumer is left behind.
_CONSUMER: Final = "leader"
_BEGINNING: Final = "0-0"
# A long job has many steps: between two reads the loop gets to renew its lease.
_STEPS_A_READ: Final = 2_000
# As PTTL says it, and the script of leases.
_ABSENT: Final = -2
_MISTYPED: Final = -3
# For Redis before 7.0.8 a wait of one millisecond has no end.
_SOON_S: Final = 0.01
# So often facts of agents of the last release are looked for, while some come.
_OLD_AGENTS_EVERY_S: Final = 0.25
_OLD_AGENTS_FOR_S: Final = 120.0
# While no more wait, facts are taken in the order in which they came. That is a second's work.
_SENDERS_IN_ORDER: Final = 2_000
_FACT_LISTS: Final = (
    *(keys.TAKEN_FACTS, keys.ARRIVED_FACTS),
    *(keys.TAKEN_FACT_SENDERS, keys.FACT_SENDERS),
)
_Record = TypeVar("_Record", StepRecord, MetricRecord)


class _NodeTexts(NamedTuple):
    """What is stored of a node."""

    record: str
    drain: str | None
    measured: Mapping[str, str] | None


class RedisNodes:
    """The port ``NodeStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._known: dict[str, tuple[_NodeTexts, Node]] = {}
        self._leases = clients.reads.register_script(machine_scripts.LEASES)
        self._put = clients.script(machine_scripts.PUT_NODE)
        self._forget = clients.script(machine_scripts.FORGET_NODE)
        self._drain = clients.script(machine_scripts.DRAIN_NODE)
        self._measure = clients.script(machine_scripts.MEASURED_NODE)

    async def nodes(self) -> list[Node]:
        """See ``NodeStore.nodes``."""
        told = await self._rows(lambda pipe, key: pipe.hgetall(key))
        records, drains, measured = (row or {} for row in told)
        by_node: dict[str, dict[str, str]] = {}
        for field, text in measured.items():
            by_node.setdefault(field.rpartition("/")[0], {})[field] = text
        found = {
            name: self._node(name, _NodeTexts(records[name], drains.get(name), by_node.get(name)))
            for name in sorted(records)
        }
        self._known = {n: known for n, known in self._known.items() if n in records}
        return [node for node in found.values() if node is not None]

    async def node(self, node_id: str) -> Node | None:
        """See ``NodeStore.node``."""
        devices = [f"{node_id}/{device}" for device in get_args(DeviceType)]
        fields = {keys.MEASURED_NODES: devices}
        told = await self._rows(lambda pipe, key: pipe.hmget(key, fields.get(key, [node_id])))
        (record,), (drain,), texts = (row or [None] for row in told)
        if record is None:
            return None
        measured = {f: text for f, text in zip(devices, texts, strict=False) if text is not None}
        return self._node(node_id, _NodeTexts(record, drain, measured or None))

    async def _rows(self, ask: Callable[[Any, str], object]) -> list[Any]:
        """What is asked of the three keys; None for one beside the records that is of another type."""
        names = (keys.NODES, keys.DRAINING_NODES, keys.MEASURED_NODES)
        # Without records there is no telling who lives; without what is kept beside them there is.
        with self._clients.answering(keys.NODES):
            async with self._clients.reads.pipeline(transaction=True) as pipe:
                for name in names:
                    ask(pipe, name)
                rows = await pipe.execute(raise_on_error=False)
            if isinstance(rows[0], Exception):
                raise rows[0]
            return self._clients.unreadable.of_their_type(names, rows)

    def _node(self, name: str, texts: "_NodeTexts") -> Node | None:
        """The node; that of the last time where it is the same to the letter."""
        known = self._known.get(name)
        if known is not None and known[0] == texts:
            return known[1]
        read = self._clients.unreadable.read
        node = read(f"{keys.NODES} {name}", Node.model_validate_json, texts.record)
        if node is None:
            return None
        told: dict[DeviceType, Measurement] = {}
        measured = texts.measured or {}
        for field, text in measured.items():
            found = read(f"{keys.MEASURED_NODES} {field}", Measurement.model_validate_json, text)
            if found is not None:
                told[cast("DeviceType", field.rpartition("/")[2])] = found
        drain = None
        if texts.drain is not None:
            drain = read(f"{keys.DRAINING_NODES} {name}", Drain.model_validate_json, texts.drain)
            # Whatever it says, somebody wants the node to be empty.
            drain = drain or Drain(asked_ms=0)
        node = node.model_copy(update={"drain": drain, "measured": told})
        self._known[name] = (texts, node)
        return node

    async def put(self, node: Node, epoch: int, before: Node | None) -> None:
        """See ``NodeStore.put``."""
        seen = "" if before is None else before.fact_id
        with answering():
            status = await self._put(
                keys=[keys.EPOCH, keys.NODES],
                args=[epoch, node.id, node.model_dump_json(), keys.WAKE, seen],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "stale":
            raise StaleWriteError(f"node {node.id} changed meanwhile")

    async def forget(self, node: Node, epoch: int | None) -> None:
        """See ``NodeStore.forget``."""
        with answering():
            status = await self._forget(
                keys=[
                    keys.EPOCH,
                    keys.NODES,
                    keys.DRAINING_NODES,
                    keys.MEASURED_NODES,
                    keys.node_lease(node.id),
                    keys.node_beat(node.id),
                    keys.node_inbox(node.id),
                    keys.node_facts(node.id),
                ],
                args=["" if epoch is None else epoch, node.id, node.fact_id, keys.WAKE],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "stale":
            raise StaleWriteError(f"node {node.id} changed meanwhile, or its agent is alive")

    async def drain(self, node_id: str, drain: Drain | None) -> None:
        """See ``NodeStore.drain``."""
        with answering():
            status = await self._drain(
                keys=[keys.NODES, keys.DRAINING_NODES],
                args=[node_id, "" if drain is None else drain.model_dump_json(), keys.WAKE],
            )
        if status == "gone":
            raise no_node(node_id)

    async def keep_measured(
        self, node_id: str, device_type: DeviceType, found: Measurement, epoch: int
    ) -> None:
        """See ``NodeStore.keep_measured``."""
        with answering():
            status = await self._measure(
                keys=[keys.EPOCH, keys.MEASURED_NODES, keys.measuring(node_id, device_type)],
                args=[epoch, f"{node_id}/{device_type}", found.model_dump_json(), keys.WAKE],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "mistyped":
            self._clients.unreadable.note_type(keys.MEASURED_NODES)

    async def leases(self, node_ids: Iterable[str]) -> dict[str, Lease]:
        """See ``NodeStore.leases``."""
        names = list(node_ids)
        with answering():
            holders, lefts = await self._leases(
                keys=[keys.node_lease(name) for name in names], args=[NAME_CHARACTERS]
            )
        found: dict[str, Lease] = {}
        for name, incarnation, left in zip(names, holders, lefts, strict=True):
            if int(left) == _MISTYPED:
                self._clients.unreadable.note_type(keys.node_lease(name))
                continue
            self._clients.unreadable.forget(keys.node_lease(name))
            if int(left) != _ABSENT:
                found[name] = Lease(incarnation, max(int(left), 0))
        return found


class RedisFacts:
    """The port ``FactQueue``: a consumer group of one consumer.

    Each node's facts arrive in a list of its own, and its id in a list for all: in that order they are taken
    into the stream, each with the node that it came from. While very many wait, known nodes have turns. Facts of agents of the last release come
    from one list, and nobody knows whose they are.
    """

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._take = clients.script(machine_scripts.TAKE_FACTS)
        self._last_of_the_last_release = -math.inf
        self._last_turn = 0

    async def prepare(self) -> None:
        """See ``FactQueue.prepare``."""
        with self._clients.answering(keys.FACTS):
            try:
                await self._clients.writes.xgroup_create(
                    keys.FACTS, keys.FACTS_GROUP, id="0", mkstream=True
                )
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def unacknowledged(self, limit: int) -> list[FactEntry]:
        """See ``FactQueue.unacknowledged``."""
        return await self._read("0", limit)

    async def next(self, limit: int, timeout_s: float) -> list[FactEntry]:
        """See ``FactQueue.next``."""
        entries = await self._taken(limit)
        if entries:
            return entries
        wait_s = min(timeout_s, MAX_BLOCK_S)
        # For what agents of the last release tell nobody can wait at the same time.
        if time.monotonic() - self._last_of_the_last_release < _OLD_AGENTS_FOR_S:
            wait_s = min(wait_s, _OLD_AGENTS_EVERY_S)
        with self._clients.answering(keys.FACT_SENDERS, keys.TAKEN_FACT_SENDERS):
            # The one that is waited for goes into a list of its own, so that a controller which
            # ends here loses none, and what arrives behind it stays behind it.
            # An agent may name a sender of hundreds of megabytes: it is not read.
            names = (keys.FACT_SENDERS, keys.TAKEN_FACT_SENDERS)
            wait = ("BLMOVE", *names, "LEFT", "RIGHT", wait_s)
            behind = ("LLEN", names[1])
            has_come = await answer_behind(self._clients.facts, wait, wait_s, behind) > 0
            if not has_come:
                # The time is over, or it was refused, which is told now.
                came = await self._clients.facts.blmove(*names, _SOON_S)  # type: ignore[arg-type] # Redis takes parts of a second
                has_come = came is not None
        return await self._taken(limit) if has_come else []

    async def _taken(self, limit: int) -> list[FactEntry]:
        with self._clients.answering(keys.FACTS, *_FACT_LISTS):
            of_the_last_release, self._last_turn = await self._take(
                keys=[keys.FACTS, *_FACT_LISTS, keys.NODES],
                args=[
                    limit,
                    keys.MESSAGE_FIELD,
                    keys.SENDER_FIELD,
                    keys.LONGEST_FACT,
                    keys.LONGEST_FACT,
                    *keys.node_facts("|").split("|"),
                    _SENDERS_IN_ORDER,
                    self._last_turn,
                ],
            )
        if of_the_last_release:
            self._last_of_the_last_release = time.monotonic()
        return await self._read(">", limit)

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """See ``FactQueue.acknowledge``."""
        with answering():
            async with self._clients.writes.pipeline(transaction=True) as pipe:
                pipe.xack(keys.FACTS, keys.FACTS_GROUP, *ids)
                pipe.xdel(keys.FACTS, *ids)
                await pipe.execute()

    async def _read(self, start: str, limit: int) -> list[FactEntry]:
        with self._clients.answering(keys.FACTS):
            try:
                answer: Any = await self._clients.facts.xreadgroup(
                    keys.FACTS_GROUP,
                    _CONSUMER,
                    {keys.FACTS: start},
                    count=limit,
                )
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                # Redis lost its data, or an empty one took its place.
                await self.prepare()
                return []
        return [
            FactEntry(name, fields.get(keys.MESSAGE_FIELD, ""), fields.get(keys.SENDER_FIELD))
            if fields
            else FactEntry(name, "", None)
            for name, fields in _rows_of_first_stream(answer)
        ]


def _rows_of_first_stream(answer: Any) -> Any:  # noqa: ANN401 a list or a dict, by protocol version
    if not answer:
        return []
    if isinstance(answer, dict):
        rows = next(iter(answer.values()))
        # redis-py wraps the rows of a RESP3 answer in one more list.
        return rows[0] if rows and isinstance(rows[0], list) else rows
    return answer[0][1]


def entries_of(rows: Any) -> list[Entry]:  # noqa: ANN401 as redis-py parses them
    """The rows of a stream."""
    # An entry that was deleted while it was pending comes without fields.
    return [
        Entry(name, fields.get(keys.MESSAGE_FIELD, "") if fields else "") for name, fields in rows
    ]
