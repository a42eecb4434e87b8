"""Plans and answers to probes in Redis."""

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from services.contract.jobs.bounded_json import JUDGED
from services.contract.messages.commands import COMMAND
from services.contract.messages.probing import MeasureNode, ModelProbed
from services.contract.redis import redis_keys as keys
from services.contract.system.cancellation import end_if_told
from services.contract.system.long_work import in_turns, uncollected
from services.contract.words.states import PlanState
from services.controller.adapters.redis.connection import (
    RedisClients,
    answering,
    is_mistyped,
    to_ms,
)
from services.controller.adapters.redis.script_parts import REFUSE_DEPOSED, TAKE_LIST, TO_INBOX
from services.controller.domain.errors import DeposedError, RecordUnreadableError, no_plan
from services.controller.domain.job.effects import Send
from services.controller.domain.plans.pace import PACES_KEPT, Pace
from services.controller.domain.plans.plan import Plan
from services.controller.ports.jobs import Place
from services.controller.ports.plans import ALL_PLANS, AmongPlans, Asked, PlanPage

_PLAN_ID: Final = re.compile("plan_[0-9a-z]{26}")
_LOOK_EVERY_S: Final = 0.1
_LOOKED_THROUGH: Final = 256

_KEEP_PLAN: Final = (
    TAKE_LIST
    + TO_INBOX
    + """
-- KEYS: plan, answer, that it was asked, inbox, that measuring was asked, inbox for that, all plans, the
-- owner's plans, which node was asked
local doc, state, ttl, fresh, field = take(), take(), take(), take(), take()
local patience, question, measuring, measure = take(), take(), take(), take()
local id, created, forgotten = take(), take(), take()
local probing, prefix, most, node, remembered = take(), take(), take(), take(), take()
local at_once = tonumber(take())
if fresh == '1' or redis.call('EXISTS', KEYS[2]) == 0 then
  local waiting = 0
  for _, other in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[8], '+inf', created - patience, 'LIMIT', 0, most)) do
    if redis.pcall('HGET', prefix .. other, 'state') == probing then waiting = waiting + 1 end
  end
  if waiting >= at_once then return 'too_many' end
end
redis.call('HSET', KEYS[1], 'doc', doc, 'state', state)
redis.call('EXPIRE', KEYS[1], ttl)
redis.call('ZADD', KEYS[7], created, id)
redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', forgotten)
redis.call('EXPIRE', KEYS[7], ttl)
redis.call('ZADD', KEYS[8], created, id)
redis.call('EXPIRE', KEYS[8], ttl)
-- Those that are being made are kept, for jobs wait for them.
local over = redis.call('ZCARD', KEYS[8]) - most
for _, oldest in ipairs(over > 0 and redis.call('ZRANGE', KEYS[8], 0, 63) or {}) do
  local is_made = redis.pcall('HGET', prefix .. oldest, 'state') ~= probing
  local since = tonumber(redis.call('ZSCORE', KEYS[8], oldest))
  if over > 0 and oldest ~= id and (is_made or since + patience < tonumber(created)) then
    redis.call('DEL', prefix .. oldest)
    redis.call('ZREM', KEYS[8], oldest)
    redis.call('ZREM', KEYS[7], oldest)
    over = over - 1
  end
end
if measure ~= '' and redis.call('SET', KEYS[5], '1', 'NX', 'EX', measuring) then
  to_inbox(KEYS[6], field, measure)
end
if fresh == '1' then redis.call('DEL', KEYS[2], KEYS[3]) end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'cached' end
if not redis.call('SET', KEYS[3], 'named', 'NX', 'PX', patience) then return 'pending' end
redis.call('SET', KEYS[9], node, 'EX', remembered)
to_inbox(KEYS[4], field, question)
return 'asked'
"""
)


_CONCLUDE_PLAN: Final = """
-- KEYS: plan; ARGV: the state that it must be in, record, state
local known = redis.call('HMGET', KEYS[1], 'state', 'doc')
if not known[1] then return {'gone', ''} end
if known[1] ~= ARGV[1] then return {'known', known[2]} end
redis.call('HSET', KEYS[1], 'doc', ARGV[2], 'state', ARGV[3])
return {'ok', ''}
"""


_KEEP_ANSWER: Final = (
    REFUSE_DEPOSED
    + """
-- KEYS: epoch, answer, that it was asked, which node was asked; ARGV: epoch, record, its life in s, node
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
-- A controller of the last release does not say whom it asked: it leaves a 1, and the node that was asked before.
if redis.call('GET', KEYS[3]) ~= '1' and redis.call('GET', KEYS[4]) ~= ARGV[4] then return 'unasked' end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('DEL', KEYS[3])
return 'ok'
"""
)


class RedisPlans:
    """The port ``PlanStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._keep = clients.script(_KEEP_PLAN)
        self._conclude = clients.script(_CONCLUDE_PLAN)
        self._keep_answer = clients.script(_KEEP_ANSWER)

    async def keep(
        self, plan: Plan, question: Send, measure: Send | None, *, fresh: bool = False
    ) -> Asked:
        """See ``PlanStore.keep``."""
        node_id, device_type = plan.node_id, plan.device_type
        if measure is not None and isinstance(measure.command, MeasureNode):
            node_id, device_type = measure.node_id, measure.command.device_type
        with answering():
            status: Asked = await self._keep(
                keys=[
                    keys.plan(plan.id),
                    keys.probe(plan.probe_id),
                    keys.probe_asked(plan.probe_id),
                    keys.node_inbox(question.node_id),
                    keys.measuring(node_id, device_type),
                    keys.node_inbox(node_id),
                    keys.PLANS,
                    keys.plans_of(plan.owner),
                    keys.probe_node(plan.probe_id),
                ],
                args=[
                    plan.model_dump_json(),
                    plan.state,
                    keys.PLAN_TTL_S,
                    int(fresh),
                    keys.MESSAGE_FIELD,
                    plan.answer_by_ms - plan.created_ms,
                    _json(question),
                    keys.MEASURING_TTL_S,
                    "" if measure is None else _json(measure),
                    plan.id,
                    plan.created_ms,
                    plan.created_ms - keys.PLAN_TTL_S * 1000,
                    PlanState.PROBING.value,
                    keys.plan(""),
                    keys.PLANS_KEPT,
                    question.node_id,
                    keys.PROBE_TTL_S,
                    keys.PLANS_PROBING,
                ],
            )
        return status

    async def load(self, plan_id: str) -> Plan:
        """See ``PlanStore.load``."""
        # What is no id could name a key of another kind.
        if not _PLAN_ID.fullmatch(plan_id):
            raise no_plan(plan_id)
        (text,) = await self._docs([plan_id])
        if text is None:
            raise no_plan(plan_id)
        return self._plan(plan_id, text)

    async def page(
        self, before: Place | None, limit: int, among: AmongPlans = ALL_PLANS
    ) -> PlanPage:
        """See ``PlanStore.page``."""
        # The place itself may be among those that are asked for.
        count = _LOOKED_THROUGH if among.states else limit + 1
        places, behind = await self._places(before, count, among.owner)
        wanted = await self._that_may_be(among, places) if among.states else places
        if len(wanted) > limit:
            wanted, behind = wanted[:limit], wanted[limit - 1]
        return PlanPage(await self._load([place.id for place in wanted]), behind)

    async def _places(
        self, before: Place | None, count: int, owner: str | None
    ) -> tuple[list[Place], Place | None]:
        """Up to ``count`` places before that one, and from where on there may be more."""
        name = keys.PLANS if owner is None else keys.plans_of(owner)
        highest = "+inf" if before is None else before.created_ms
        offset = 0
        while True:
            end_if_told()
            with self._clients.answering(name):
                rows: Any = await self._clients.reads.zrevrangebyscore(
                    name, highest, "-inf", start=offset, num=count, withscores=True
                )
            found = [Place(to_ms(score), plan_id) for plan_id, score in rows]
            places = [place for place in found if before is None or place < before]
            if len(rows) < count:
                return places, None
            if places:  # else as many were made in that same millisecond
                return places, places[-1]
            offset += count

    async def _that_may_be(self, among: AmongPlans, places: Sequence[Place]) -> list[Place]:
        """Those whose records need to be read: to read one with a large spec takes a hundred times as long."""
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for place in places:
                    pipe.hget(keys.plan(place.id), "state")
                states = await pipe.execute(raise_on_error=False)
        # What has another type is named as such where it is read.
        return [
            place
            for place, state in zip(places, states, strict=True)
            if state is not None and (not isinstance(state, str) or among.may_be(state))
        ]

    async def _load(self, plan_ids: list[str]) -> list[Plan]:
        """Those that are there and make sense here."""
        if not plan_ids:
            return []
        found: list[Plan] = []
        texts = await self._docs(plan_ids)
        async for plan_id, text in in_turns(zip(plan_ids, texts, strict=True)):
            if text is not None:  # forgotten; its place in the list goes with the next plan
                with contextlib.suppress(RecordUnreadableError):
                    found.append(self._plan(plan_id, text))
        return found

    async def _docs(self, plan_ids: Sequence[str]) -> list[str | None]:
        """What is stored of plans: None for nothing, "" where the key has another type."""
        names = [keys.plan(plan_id) for plan_id in plan_ids]
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(name, "doc")
                rows = await pipe.execute(raise_on_error=False)
            self._clients.unreadable.of_their_type(names, rows)
        return ["" if is_mistyped(row) else row for row in rows]

    def _plan(self, plan_id: str, text: str) -> Plan:
        name = f"{keys.plan(plan_id)} doc"
        try:
            plan = Plan.model_validate_json(text, context=JUDGED)
        except ValidationError as error:
            self._clients.unreadable.note(name, hash(text), error)
            raise RecordUnreadableError(
                f"the record of plan {plan_id} cannot be read by this version of the controller; "
                "make a new one with POST /v1/plans"
            ) from error
        self._clients.unreadable.forget(name)
        return plan

    async def conclude(self, plan: Plan) -> Plan:
        """See ``PlanStore.conclude``."""
        with answering():
            status, known = await self._conclude(
                keys=[keys.plan(plan.id)],
                args=[PlanState.PROBING.value, plan.model_dump_json(), plan.state],
            )
        if status == "gone":
            raise no_plan(plan.id)
        return plan if status == "ok" else self._plan(plan.id, known)

    async def keep_answer(self, answer: ModelProbed, epoch: int) -> bool:
        """See ``PlanStore.keep_answer``."""
        name = answer.probe_id
        lives_s = keys.FAILED_PROBE_TTL_S if answer.failure else keys.PROBE_TTL_S
        with answering():
            status = await self._keep_answer(
                keys=[
                    keys.EPOCH,
                    *(name_of(name) for name_of in (keys.probe, keys.probe_asked, keys.probe_node)),
                ],
                args=[epoch, answer.model_dump_json(), lives_s, answer.node_id],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        return bool(status == "ok")

    async def answer(self, probe_id: str) -> ModelProbed | None:
        """See ``PlanStore.answer``."""
        name = keys.probe(probe_id)
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                pipe.get(name)
                rows = await pipe.execute(raise_on_error=False)
            (text,) = self._clients.unreadable.of_their_type([name], rows)
        if text is None and not is_mistyped(rows[0]):
            return None
        try:
            with uncollected():
                return ModelProbed.model_validate_json(text or "")
        except ValidationError as error:
            raise RecordUnreadableError(
                f"the answer to {probe_id} cannot be read by this version of the controller; "
                "ask again with POST /v1/plans?fresh=true"
            ) from error

    async def keep_pace(self, probe_id: str, pace: Pace) -> None:
        """See ``PlanStore.keep_pace``."""
        name = keys.probe_paces(probe_id)
        with answering():
            async with self._clients.writes.pipeline(transaction=True) as pipe:
                pipe.lpush(name, pace.model_dump_json())
                pipe.ltrim(name, 0, PACES_KEPT - 1)
                pipe.expire(name, keys.PLAN_TTL_S)
                rows = await pipe.execute(raise_on_error=False)
            self._clients.unreadable.of_their_type([name] * len(rows), rows)

    async def paces(self, probe_id: str) -> list[Pace]:
        """See ``PlanStore.paces``."""
        name = keys.probe_paces(probe_id)
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                pipe.lrange(name, 0, -1)
                rows = await pipe.execute(raise_on_error=False)
            (texts,) = self._clients.unreadable.of_their_type([name], rows)
        return self._clients.unreadable.read_all(name, Pace.model_validate_json, texts or ())

    async def wait(self, probe_id: str, timeout_s: float) -> None:
        """See ``PlanStore.wait``. It looks now and then: waiting requests hold no connection."""
        ends = time.monotonic() + timeout_s
        while not await self.is_answered(probe_id):
            end_if_told()
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, _LOOK_EVERY_S))

    async def is_answered(self, probe_id: str) -> bool:
        """See ``PlanStore.is_answered``."""
        with answering():
            return bool(await self._clients.reads.exists(keys.probe(probe_id)))


def _json(send: Send) -> str:
    return COMMAND.dump_json(send.command).decode()
