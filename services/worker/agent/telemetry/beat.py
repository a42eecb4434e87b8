"""One beat of a node: it renews the node's lease, and writes what its ranks did.

Two scripts, for telemetry may have a server of its own. The first compares before it writes: a lease that
another incarnation holds, and for each gang the fence of its job. The others write telemetry of the gangs that
it found current. Records carry the number of the beat that brings them, so that a beat which is
repeated because its answer was lost writes none twice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.contract.messages.telemetry import RankSample
from services.contract.redis import redis_keys
from services.worker.agent.telemetry.gang_telemetry import Records

GangKey = tuple[str, int]

_RENEW: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return {'taken', holder}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local fenced, unknown = {}, {}
for key = 3, #KEYS do
  local job, fence = ARGV[2 * key - 3], tonumber(ARGV[2 * key - 2])
  local current, why = redis.pcall('HGET', KEYS[key], 'fence'), nil
  if type(current) == 'table' then
    current, why = true, current.err
  end
  -- A record that makes no sense judges no gang, and must not cost the others their beat.
  if why and not string.find(why, '^WRONGTYPE') then
    return redis.error_reply(why)
  elseif (tonumber(current) or 0) > fence or redis.call('SISMEMBER', KEYS[2], job) == 1 then
    table.insert(fenced, key - 3)
  elseif not current then
    table.insert(unknown, key - 3)
  end
end
return {'kept', holder and 1 or 0, now, fenced, unknown}
"""
# Samples come without their closing brace: the moment is that of the server with the leases, and is added
# here. Nothing here decodes JSON, because Lua's numbers would round what the ranks measured.
_WRITE: Final = """
local applied = redis.call('HMGET', KEYS[1], 'incarnation', 'number', 'ids')
local fresh = applied[1] ~= ARGV[1] or tonumber(applied[2]) < tonumber(ARGV[2])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'number', ARGV[2])
local at = 7
local function take()
  at = at + 1
  return ARGV[at - 1]
end
local ids = {}
for key = 2, #KEYS, 3 do
  local gang = take()
  for _ = 1, tonumber(take()) do
    local rank, sample = take(), take()
    -- Not call: every agent may write these keys, and one of another type must not cost the others theirs.
    redis.pcall('HSET', KEYS[key], rank, sample .. ',"seen_ms":' .. ARGV[3] .. '}')
  end
  for stream = 1, 2 do
    local kept, given = ARGV[stream + 3], {}
    for _ = 1, tonumber(take()) do
      local record = take()
      if fresh then
        local id = redis.pcall('XADD', KEYS[key + stream], 'MAXLEN', '~', kept, '*', ARGV[6], record)
        table.insert(given, type(id) == 'string' and id or '')
      end
    end
    ids[gang .. stream] = table.concat(given, ' ')
  end
end
-- A beat that is repeated is told the ids that it was given.
if fresh then
  ids = cjson.encode(ids)
  redis.call('HSET', KEYS[1], 'ids', ids)
  return ids
end
return applied[3] or '{}'
"""
# Apart from the others: a server whose rules for agents are older than these streams refuses this
# script alone. One that is repeated is shown once.
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
for key = 1, #KEYS do
  local given, count = {}, tonumber(ARGV[at])
  for record = at + 1, at + count do
    local id = add(KEYS[key], ARGV[record])
    table.insert(given, type(id) == 'string' and id or '')
  end
  table.insert(ids, table.concat(given, ' '))
  at = at + 1 + count
end
return ids
"""
_MOST_NAMES: Final = 10_000
_IDS: Final = TypeAdapter(dict[str, str])
_RELEASE: Final = """
return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0
"""


@dataclass(frozen=True)
class BeatAnswer:
    """What Redis said. ``taken_by``: another incarnation holds the lease and nothing was written.

    ``lapsed``: the lease had run out and was taken again. ``fenced``: gangs of void attempts, or of
    jobs that were deleted. ``unknown``: gangs of jobs that Redis does not know and that nobody
    deleted: it has lost them. Nothing may be written of either. ``now_ms``: the moment, by Redis's clock.
    """

    taken_by: str | None = None
    lapsed: bool = False
    fenced: tuple[GangKey, ...] = ()
    unknown: tuple[GangKey, ...] = ()
    now_ms: str = ""


class LearnedNames:
    """Under which name telemetry of each job is in Redis, as its controller gave it with the launch.

    Of any other job it is the job's id, as without a secret.
    """

    def __init__(self) -> None:
        self._by_job: dict[str, str] = {}

    def learn(self, job_id: str, name: str) -> None:
        """Take the name of a job that is launched. Known are those of the 10 000 jobs that were launched or written last."""
        self._by_job.pop(job_id, None)
        self._by_job[job_id] = name
        if len(self._by_job) > _MOST_NAMES:
            del self._by_job[next(iter(self._by_job))]

    def of(self, job_id: str) -> str:
        """The name of a job."""
        name = self._by_job.pop(job_id, None)
        if name is None:
            return job_id
        self._by_job[job_id] = name
        return name


class Beat:
    """Writes beats for one life of an agent.

    Args:
        redis: A client that does not retry.
        telemetry: The same of the server that has telemetry.
        node_id: The node.
        incarnation: The life.
        names: Under which telemetry of jobs is written; unset: their ids.
    """

    def __init__(
        self,
        redis: Redis,
        telemetry: Redis,
        node_id: str,
        incarnation: str,
        names: LearnedNames | None = None,
    ) -> None:
        self._names = names or LearnedNames()
        self._node_id = node_id
        self._incarnation = incarnation
        self._renew = redis.register_script(_RENEW)
        self._release = redis.register_script(_RELEASE)
        self._write = telemetry.register_script(_WRITE)
        self._metrics = telemetry.register_script(_METRICS)

    async def renew(self, gangs: Collection[GangKey]) -> BeatAnswer:
        """Renew the lease, and learn how these gangs stand.

        Raises:
            RedisError: It may or may not have been renewed.
        """
        told = list(gangs)
        keys = [redis_keys.node_lease(self._node_id), redis_keys.DELETED_JOBS]
        keys += [redis_keys.job(job_id) for job_id, _ in told]
        arguments = [
            self._incarnation,
            redis_keys.NODE_LEASE_MS,
            *(part for g in told for part in g),
        ]
        kind, *details = await self._renew(keys=keys, args=arguments)
        if kind == "taken":
            return BeatAnswer(taken_by=str(details[0]))
        was_held, now_ms, *indexed = details
        fenced, unknown = (tuple(told[int(index)] for index in indices) for indices in indexed)
        return BeatAnswer(lapsed=not was_held, fenced=fenced, unknown=unknown, now_ms=str(now_ms))

    async def write(
        self,
        number: int,
        now_ms: str,
        samples: Mapping[GangKey, Sequence[RankSample]],
        records: Sequence[Records],
    ) -> dict[GangKey, dict[str, str]]:
        """Write the samples, and the records of beat ``number`` (from 1, growing; the same again with them).

        Answers, by gang and kind of records, the id that each of them was given, separated by blanks; "" where
        none was written.

        Raises:
            RedisError: It may or may not have been written.
        """
        by_gang = {(r.job_id, r.fence): r for r in records}
        gangs = list(dict.fromkeys([*samples, *by_gang]))
        keys = [redis_keys.node_beat(self._node_id)]
        arguments: list[str | int] = [
            self._incarnation,
            number,
            now_ms,
            redis_keys.STEPS_KEPT,
            redis_keys.LOGS_KEPT,
            redis_keys.MESSAGE_FIELD,
        ]
        for gang in gangs:
            job_id, _ = gang
            name = self._names.of(job_id)
            keys += [
                redis_keys.job_ranks(name),
                redis_keys.job_steps(name),
                redis_keys.job_logs(name),
            ]
            arguments.append(_name(gang))
            arguments += _counted_samples(samples.get(gang, ()))
            arguments += _counted_records(by_gang.get(gang))
        given = _IDS.validate_json(await self._write(keys=keys, args=arguments))
        return {
            gang: {
                kind: given.get(f"{_name(gang)}{place}", "")
                for place, kind in enumerate(("steps", "logs"), 1)
            }
            for gang in gangs
        }

    async def write_metrics(self, records: Sequence[Records]) -> dict[GangKey, str]:
        """Write what the users' code measured.

        Answers, by gang, the ids of its records, separated by blanks; "" where none was written.

        Raises:
            NoPermissionError: The server does not let agents write it.
            RedisError: It may or may not have been written.
        """
        telling = [r for r in records if r.metrics]
        if not telling:
            return {}
        keys = [redis_keys.job_metrics(self._names.of(told.job_id)) for told in telling]
        arguments: list[str | int] = [redis_keys.METRICS_KEPT, redis_keys.MESSAGE_FIELD]
        for told in telling:
            arguments.append(len(told.metrics))
            arguments += [record.model_dump_json() for record in told.metrics]
        ids = await self._metrics(keys=keys, args=arguments)
        return {(r.job_id, r.fence): str(given) for r, given in zip(telling, ids, strict=True)}

    async def release(self) -> None:
        """Give the lease up, if it is ours."""
        await self._release(keys=[redis_keys.node_lease(self._node_id)], args=[self._incarnation])


def _name(gang: GangKey) -> str:
    return f"{gang[0]}/{gang[1]}/"


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
