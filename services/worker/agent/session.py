"""This agent's standing with the controller: its lease, its beats, its joining and leaving."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog
from pydantic import ValidationError
from redis.exceptions import NoPermissionError, ResponseError

from services.contract.messages.facts import Fact, Inventory, NodeJoined, NodeLeaving, NodeLeft
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys
from services.contract.redis.lease_keeper import LeaseKeeper
from services.contract.redis.redis_address import with_advice
from services.contract.system.cancellation import end_if_told
from services.worker.agent.storage.journal import Journal
from services.worker.agent.streams.redis_clients import (
    REDIS_AWAY,
    RULES_ARE_OLD,
    Connections,
    NewestFirst,
    while_away,
)
from services.worker.agent.supervisor import Supervisor
from services.worker.agent.telemetry.beat import Beat, GangKey
from services.worker.agent.telemetry.gang_telemetry import Records
from services.worker.agent.telemetry.held_records import HeldRecords

BEAT_S: Final = 0.5
_IDLE_BEAT_S: Final = 1.0
"""Without a gang a beat only renews the lease, which outlives two that get no answer."""
_ASK_EVERY_S: Final = 0.2
_BEATS_HELD: Final = 120
_TELEMETRY_AWAITED_S: Final = 10.0
"""Where telemetry has a server of its own, the end of a gang waits so long for its last records to be there."""
_TAKE_OVER: Final = """
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] or holder == ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return ''
end
return holder
"""
_log = structlog.get_logger()


class LeaseTakenError(Exception):
    """Another living agent has this node id."""


@dataclass(frozen=True)
class Life:
    """Who joins: a node, in one life of its agent, with what it has."""

    node_id: str
    incarnation: str
    inventory: Inventory


class Session:
    """One life of this node's agent, as Redis knows it.

    Args:
        connections: To Redis.
        life: The node, this life of its agent, and what the node has.
        supervisor: What the beats tell about.
        tell: Takes the facts, in order.
        journal: Takes what Redis has taken, for storage.
        lease: Keeps the node's lease while the loop is busy.

    Attributes:
        loss_suspected: Set when Redis may have lost jobs that storage holds.
    """

    def __init__(
        self,
        connections: Connections,
        life: Life,
        supervisor: Supervisor,
        tell: Callable[[Fact], None],
        journal: Journal,
        lease: LeaseKeeper,
    ) -> None:
        self._journal = journal
        self._lease = lease
        self.loss_suspected = asyncio.Event()
        self._redis = connections.writing
        self._newest = NewestFirst(connections.telemetry)
        self._telemetry_is_apart = connections.telemetry_is_apart
        self._node_id = life.node_id
        self._incarnation = life.incarnation
        self._inventory = life.inventory
        self._supervisor = supervisor
        self._tell = tell
        self._held = HeldRecords()
        self._beats_held = 0
        self._beat = Beat(
            connections.writing,
            connections.telemetry,
            life.node_id,
            life.incarnation,
            supervisor.telemetry_names,
        )
        self._number = 0
        self._joins = 0
        self._has_left = False
        self._unconfirmed: Sequence[Records] | None = None
        self._connected = True
        self._may_know_less = False
        self._telemetry_away_since: float | None = None
        self._metrics_refused = False
        self._beating = asyncio.Lock()
        self._has_released = False

    async def take_lease(self, previous: str | None) -> None:
        """Take the node's lease, from the ``previous`` life of this same agent at once.

        Raises:
            LeaseTakenError: Somebody else keeps renewing it.
        """
        script = self._redis.register_script(_TAKE_OVER)
        keys = [redis_keys.node_lease(self._node_id)]
        lease_ms = redis_keys.NODE_LEASE_MS
        arguments: list[str | int] = [previous or "", self._incarnation, lease_ms]
        holder: object = None
        answered: float | None = None
        clock = asyncio.get_running_loop()
        while True:
            async for attempt in while_away(self._lost):
                with attempt:
                    end_if_told()
                    holder = await script(keys=keys, args=arguments)
                    if not holder:
                        self._lease.renewed(self._incarnation)
                        return
            answered = clock.time() if answered is None else answered
            # A dead agent's lease runs out within this time; a living one's does not.
            if clock.time() > answered + lease_ms / 1000 + 2 * BEAT_S:
                raise LeaseTakenError(_taken(self._node_id, str(holder)))
            await asyncio.sleep(_ASK_EVERY_S)

    async def hand_over(self, records: Sequence[Records]) -> None:
        """Write the steps of an earlier life that are not in Redis yet.

        To be done before anything is told of that life's end, which makes its fences void.

        Raises:
            LeaseTakenError: Another incarnation holds the lease.
        """
        self._number += 1
        async for attempt in while_away(self._lost):
            with attempt:
                end_if_told()
                self._unconfirmed = [await self._unwritten(left) for left in records]
                await self._beat_once()

    def join(self) -> None:
        """Tell that this agent is there, with what it runs; nothing once it has left."""
        if self._has_left:
            return  # the next attempt would be placed here
        self._may_know_less = False
        self._joins += 1
        self._tell(
            NodeJoined(
                node_id=self._node_id,
                incarnation=self._incarnation,
                number=self._joins,
                inventory=self._inventory,
                gangs=self._supervisor.running(),
            )
        )

    def storage_is(self, storage_id: str | None, fault: str | None) -> None:
        """Tell what became of the storage since the agent joined."""
        now = {"storage_id": storage_id, "storage_fault": fault}
        self._inventory = self._inventory.model_copy(update=now)
        self.join()

    async def run(self) -> None:
        """Beat until cancelled, or until the lease is given up.

        Raises:
            LeaseTakenError: Another incarnation holds the lease.
        """
        urgent = self._supervisor.urgent
        clock = asyncio.get_running_loop()
        while True:
            end_if_told()
            began = clock.time()
            try:
                async with self._beating:
                    if self._has_released:
                        return  # a beat would take the lease again
                    await self._beat_once()
            except REDIS_AWAY as error:
                self._lost(str(error))
                # No pause after a wait for an answer: the lease would expire before the third beat.
                await asyncio.sleep(began + BEAT_S - clock.time())
                continue
            self._join_again()  # not before all of a beat was taken: what refuses a part may do so for long
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_BEAT_S if self._supervisor.is_idle else BEAT_S):
                    await urgent.wait()

    def set_out(self, grace_s: float) -> None:
        """Tell that this agent is to go, and has so many seconds for its gangs to move elsewhere."""
        self._tell(
            NodeLeaving(node_id=self._node_id, incarnation=self._incarnation, grace_s=grace_s)
        )

    def leave(self) -> None:
        """Tell that this agent goes of its own will, its ranks gone."""
        self._has_left = True
        self._tell(NodeLeft(node_id=self._node_id, incarnation=self._incarnation))

    async def release_lease(self) -> None:
        """Give the lease up.

        Raises:
            RedisError: It will run out by itself.
        """
        async with self._beating:
            self._has_released = True
            self._lease.given_up()
            await self._beat.release()

    async def _unwritten(self, left: Records) -> Records:
        try:
            key = redis_keys.job_steps(self._supervisor.telemetry_names.of(left.job_id))
            rows = await self._newest.rows(key, "+", 1)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            # Another agent's doing: it must not keep this one from joining.
            _log.error("steps_unreadable", job=left.job_id, why=str(error))
            return left
        except REDIS_AWAY:
            # The beat that follows sees whether it is; steps that are told twice are shown once.
            return left
        if not rows:
            return left
        ((entry, body),) = rows
        try:
            last = StepRecord.model_validate_json(body)
        except ValidationError as error:  # steps that are told twice are shown once
            _log.error("step_unreadable", job=left.job_id, entry=entry, why=str(error))
            return left
        later = (s for s in left.steps if (s.fence, s.step) > (last.fence, last.step))
        return replace(left, steps=tuple(later))

    async def _beat_once(self) -> None:
        self._supervisor.urgent.clear()
        if self._unconfirmed is None:
            self._number += 1
            self._held.add(self._supervisor.take_records())
            self._unconfirmed = self._held.next_beat()
        samples = self._supervisor.samples()
        gangs = dict.fromkeys([*samples, *map(_gang, self._unconfirmed)])
        answer = await self._beat.renew(gangs)
        if answer.taken_by is not None:
            raise LeaseTakenError(_taken(self._node_id, answer.taken_by))
        self._lease.renewed(self._incarnation)
        if not self._connected:
            self._connected = True
            _log.info("redis_is_back")
            self.loss_suspected.set()  # it may be back with an older copy of its data
        if answer.lapsed:
            # The controller may have given this node up, or Redis may have lost what it knew.
            _log.warning("lease_had_lapsed")
            self.join()
        if answer.lapsed or answer.unknown:
            self.loss_suspected.set()
        self._supervisor.fence_off(list(answer.fenced))
        # What nobody would take now is brought again once the job is known again.
        self._beats_held = self._beats_held + 1 if answer.unknown else 0
        lost = set(answer.unknown) if self._beats_held < _BEATS_HELD else set()
        void = {*answer.fenced, *answer.unknown}
        current = [told for told in self._unconfirmed if _gang(told) not in void]
        try:
            ids = await self._beat.write(
                self._number,
                answer.now_ms,
                {gang: told for gang, told in samples.items() if gang not in void},
                current,
            )
            metric_ids = await self._write_metrics(current)
        except REDIS_AWAY as error:
            if not self._telemetry_is_apart:
                raise
            self._telemetry_lost(str(error), lost)
            return
        self._telemetry_answers()
        for told in self._unconfirmed:
            key = _gang(told)
            if key in lost or key in answer.fenced:
                continue
            self._journal.take(
                *key,
                {"steps": told.steps, "metrics": told.metrics, "logs": told.logs},
                {**ids.get(key, {}), "metrics": metric_ids.get(key, "")},
            )
        self._held.put_back(told for told in self._unconfirmed if _gang(told) in lost)
        self._unconfirmed = None
        self._supervisor.records_written(held_back=self._held.gangs)

    def _join_again(self) -> None:
        """In what the controller knows now, gangs that run here may not have begun, or ended ones run."""
        if self._may_know_less:
            self.join()

    def _telemetry_lost(self, why: str, lost: Collection[GangKey]) -> None:
        """Training, and what is decided of it, goes on: gangs that have ended are reported without it."""
        now = asyncio.get_running_loop().time()
        if self._telemetry_away_since is None:
            self._telemetry_away_since = now
            _log.warning("telemetry_unreachable", why=with_advice(why))
        if now > self._telemetry_away_since + _TELEMETRY_AWAITED_S:
            # Those that go on keep more of their own than is held here.
            self._held.add(self._supervisor.take_records(only_ended=True))
            self._supervisor.records_written(held_back=lost)

    def _telemetry_answers(self) -> None:
        if self._telemetry_away_since is not None:
            self._telemetry_away_since = None
            _log.info("telemetry_is_back")

    async def _write_metrics(self, records: Sequence[Records]) -> Mapping[GangKey, str]:
        try:
            return await self._beat.write_metrics(records)
        except NoPermissionError as error:
            if not self._metrics_refused:
                _log.error("metrics_refused", why=str(error), advice=RULES_ARE_OLD)
            self._metrics_refused = True
            return {}

    def _lost(self, why: str) -> None:
        self._may_know_less = True
        if self._connected:
            self._connected = False
            _log.warning("redis_unreachable", why=with_advice(why))


def _gang(told: Records) -> GangKey:
    return told.job_id, told.fence


def _taken(node_id: str, holder: str) -> str:
    return (
        f"node id {node_id} is in use by another agent (incarnation {holder}): "
        "give each agent its own MESHLOOM_NODE_ID"
    )
