"""One beat of a node: a single script that renews its lease and writes what its ranks did.

It compares before it writes: a lease that another incarnation holds, and for each gang the fence
of its job. Records carry the number of the beat that brings them, so that a beat which is
repeated because its answer was lost writes none twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from services.contract.messages.telemetry import RankSample
from services.contract.redis import redis_keys
from services.worker.agent.telemetry.gang_telemetry import Records

GangKey = tuple[str, int]

# Samples come without their closing brace: the moment is Redis's to add. Nothing here decodes
# JSON, because Lua's numbers would round what the ranks measured.
_BEAT: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return {'taken', holder}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local applied = redis.call('HMGET', KEYS[2], 'incarnation', 'number', 'ids')
local fresh = applied[1] ~= ARGV[1] or tonumber(applied[2]) < tonumber(ARGV[3])
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'number', ARGV[3])
local at = 7
local function take()
  at = at + 1
  return ARGV[at - 1]
end
local fenced, unknown, ids = {}, {}, {}
for key = 4, #KEYS, 4 do
  local job, fence = take(), tonumber(take())
  local current = redis.call('HGET', KEYS[key], 'fence')
  local allowed = current and tonumber(current) <= fence
  if current and not allowed or redis.call('SISMEMBER', KEYS[3], job) == 1 then
    table.insert(fenced, (key - 4) / 4)
  elseif not current then
    table.insert(unknown, (key - 4) / 4)
  end
  for _ = 1, tonumber(take()) do
    local rank, sample = take(), take()
    if allowed then
      redis.call('HSET', KEYS[key + 1], rank, sample .. ',"seen_ms":' .. now .. '}')
    end
  end
  for stream = 2, 3 do
    local kept, given = ARGV[stream + 2], {}
    for _ = 1, tonumber(take()) do
      local record = take()
      if allowed and fresh then
        -- Not call: a stream to which nothing can be added must not cost the node its lease.
        local id = redis.pcall('XADD', KEYS[key + stream], 'MAXLEN', '~', kept, '*', ARGV[6], record)
        table.insert(given, type(id) == 'string' and id or '')
      end
    end
    table.insert(ids, table.concat(given, ' '))
  end
end
-- A beat that is repeated is told the ids that it was given.
if fresh then
  redis.call('HSET', KEYS[2], 'ids', cjson.encode(ids))
else
  ids = cjson.decode(applied[3] or '[]')
end
return {'kept', holder and 1 or 0, fenced, unknown, ids}
"""
# Apart from the beat: a server whose rules for agents are older than these streams refuses this
# script alone, and the node keeps its lease. One that is repeated is shown once.
_METRICS: Final = """
-- A stream to which nothing can be added costs itself alone; a Redis that takes nothing is asked again later.
local function add(key, record)
  local id = redis.pcall('XADD', key, 'MAXLEN', '~', ARGV[1], '*', ARGV[2], record)
  if type(id) == 'string' or string.find(id.err, '^WRONGTYPE') or string.find(id.err, '^ERR') then
    return id
  end
  return redis.call('XADD', key, 'MAXLEN', '~', ARGV[1], '*', ARGV[2], record)
end
local at, ids = 3, {}
for key = 2, #KEYS, 2 do
  local given = {}
  local job, fence, count = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local current = redis.call('HGET', KEYS[key], 'fence')
  local allowed = current and tonumber(current) <= fence
  if allowed and redis.call('SISMEMBER', KEYS[1], job) == 0 then
    for record = at + 3, at + 2 + count do
      local id = add(KEYS[key + 1], ARGV[record])
      table.insert(given, type(id) == 'string' and id or '')
    end
  end
  table.insert(ids, table.concat(given, ' '))
  at = at + 3 + count
end
return ids
"""
_RELEASE: Final = """
return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0
"""


@dataclass(frozen=True)
class BeatAnswer:
    """What Redis said. ``taken_by``: another incarnation holds the lease and nothing was written.

    ``lapsed``: the lease had run out and was taken again. ``fenced``: gangs of void attempts, or of
    jobs that were deleted. ``unknown``: gangs of jobs that Redis does not know and that nobody
    deleted: it has lost them. Nothing was written of either. ``ids``: by gang and kind of records, the id that
    each of them was given, separated by blanks; "" where none was written.
    """

    taken_by: str | None = None
    lapsed: bool = False
    fenced: tuple[GangKey, ...] = ()
    unknown: tuple[GangKey, ...] = ()
    ids: Mapping[GangKey, Mapping[str, str]] = field(default_factory=dict, compare=False)


class Beat:
    """Writes beats for one life of an agent.

    Args:
        redis: A client that does not retry.
        node_id: The node.
        incarnation: The life.
    """

    def __init__(self, redis: Redis, node_id: str, incarnation: str) -> None:
        self._redis = redis
        self._node_id = node_id
        self._incarnation = incarnation
        self._script = redis.register_script(_BEAT)
        self._metrics = redis.register_script(_METRICS)
        self._release = redis.register_script(_RELEASE)

    async def write(
        self,
        number: int,
        samples: Mapping[GangKey, Sequence[RankSample]],
        records: Sequence[Records],
    ) -> BeatAnswer:
        """Write beat ``number`` (from 1, growing; the same again with the same records).

        Raises:
            RedisError: It may or may not have been written.
        """
        by_gang = {(r.job_id, r.fence): r for r in records}
        gangs = list(dict.fromkeys([*samples, *by_gang]))
        keys = [
            redis_keys.node_lease(self._node_id),
            redis_keys.node_beat(self._node_id),
            redis_keys.DELETED_JOBS,
        ]
        arguments: list[str | int] = [
            self._incarnation,
            redis_keys.NODE_LEASE_MS,
            number,
            redis_keys.STEPS_KEPT,
            redis_keys.LOGS_KEPT,
            redis_keys.MESSAGE_FIELD,
        ]
        for gang in gangs:
            job_id, fence = gang
            keys += [
                redis_keys.job(job_id),
                redis_keys.job_ranks(job_id),
                redis_keys.job_steps(job_id),
                redis_keys.job_logs(job_id),
            ]
            arguments += [job_id, fence]
            arguments += _counted_samples(samples.get(gang, ()))
            arguments += _counted_records(by_gang.get(gang))
        kind, detail, *lists = await self._script(keys=keys, args=arguments)
        if kind == "taken":
            return BeatAnswer(taken_by=str(detail))
        *indexed, ids = lists
        fenced, unknown = (tuple(gangs[int(index)] for index in indices) for indices in indexed)
        # Of one that was repeated by an agent of an older version none are known.
        by_kind = {
            gang: {"steps": str(steps), "logs": str(logs)}
            for gang, steps, logs in zip(gangs, ids[0::2], ids[1::2], strict=False)
        }
        return BeatAnswer(lapsed=not detail, fenced=fenced, unknown=unknown, ids=by_kind)

    async def write_metrics(self, records: Sequence[Records]) -> dict[GangKey, str]:
        """Write what the users' code measured; nothing of void attempts or deleted jobs.

        Answers, by gang, the ids of its records, separated by blanks; "" where none was written.

        Raises:
            NoPermissionError: The server does not let agents write it.
            RedisError: It may or may not have been written.
        """
        telling = [r for r in records if r.metrics]
        if not telling:
            return {}
        keys = [redis_keys.DELETED_JOBS]
        arguments: list[str | int] = [redis_keys.METRICS_KEPT, redis_keys.MESSAGE_FIELD]
        for told in telling:
            keys += [redis_keys.job(told.job_id), redis_keys.job_metrics(told.job_id)]
            arguments += [told.job_id, told.fence, len(told.metrics)]
            arguments += [record.model_dump_json() for record in told.metrics]
        ids = await self._metrics(keys=keys, args=arguments)
        return {(r.job_id, r.fence): str(given) for r, given in zip(telling, ids, strict=True)}

    async def release(self) -> None:
        """Give the lease up, if it is ours."""
        await self._release(keys=[redis_keys.node_lease(self._node_id)], args=[self._incarnation])


def _counted_samples(samples: Sequence[RankSample]) -> list[str | int]:
    arguments: list[str | int] = [len(samples)]
    for sample in samples:
        arguments += [sample.rank, sample.model_dump_json(exclude={"seen_ms"}).removesuffix("}")]
    return arguments


def _counted_records(records: Records | None) -> list[str | int]:
    if records is None:
        return [0, 0]
    steps = [step.model_dump_json() for step in records.steps]
    logs = [line.model_dump_json() for line in records.logs]
    return [len(steps), *steps, len(logs), *logs]
