"""The Lua scripts that write jobs, with their events, indexes and commands."""

from typing import Final

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.script_parts import (
    FIND_MISTYPED,
    LIVE_AT_MOST,
    PLAIN_JSON,
    REFUSE_DEPOSED,
    TAKE_LIST,
    TO_INBOX,
)

# Whoever keeps active jobs in memory follows this stream; of another type it costs them time, and no write.
_TELL_CHANGE: Final = """
local function tell_change(key, kept, id, version, active)
  redis.pcall('XADD', key, 'MAXLEN', '~', kept, '*', 'm', id, 'v', version, 'a', active)
end
"""


# Dashboards and webhooks read it. Of another type it costs them their events, and no write.
_TELL_EVENT: Final = f"""
local function tell_event(feed, field, event, id)
  redis.pcall('XADD', feed, 'MAXLEN', '~', {keys.EVENT_FEED_KEPT}, '*', field, event, '{keys.JOB_FIELD}', id)
end
"""


# The indexes in which a job stands are named in its record: whoever writes it takes it out of those. One of
# another type costs its list, and no write.
_RELIST: Final = (
    PLAIN_JSON
    + """
local function relist(job, id, created, listed)
  local before = redis.pcall('HGET', job, 'listed')
  if before == listed then return end
  local could, names = pcall(cjson.decode, type(before) == 'string' and before or '[]')
  for _, key in ipairs(could and type(names) == 'table' and names or {}) do
    redis.pcall('ZREM', key, id)
  end
  if listed == '' then return end
  for _, key in ipairs(cjson.decode(listed)) do redis.pcall('ZADD', key, created, id) end
  redis.call('HSET', job, 'listed', listed)
end
"""
)


# Storage tells of jobs that Redis does not know, which may have been lost, or deleted. One that never had
# an attempt left nothing there; to remember it forever, too, would let its owner fill the memory.
_REMEMBER_DELETED: Final = """
local function remember_deleted(key, job, id)
  if redis.pcall('HGET', job, 'fence') ~= '0' then redis.call('SADD', key, id) end
end
"""


# An index of another type counts as empty: it costs its bound, and no write.
_COUNT_TO_QUOTA: Final = """
local function is_full(index, most)
  if most == '' then return false end
  local count = redis.pcall('ZCARD', index)
  return type(count) == 'number' and count >= tonumber(most)
end

-- Records that are whole are those of jobs that have not been decided about yet.
local function spec_bytes(job)
  local part = redis.pcall('HSTRLEN', job, 'spec')
  if part == 0 then part = redis.pcall('HSTRLEN', job, 'doc') end
  return type(part) == 'number' and part or 0
end

local function are_too_large(index, records, bytes, most)
  if most == '' then return false end
  local ids = redis.pcall('ZRANGE', index, 0, -1)
  if ids['err'] then return false end
  for _, id in ipairs(ids) do bytes = bytes + spec_bytes(records .. id) end
  return bytes > tonumber(most)
end
"""


COMMIT: Final = (
    REFUSE_DEPOSED
    + _REMEMBER_DELETED
    + TAKE_LIST
    + FIND_MISTYPED
    + TO_INBOX
    + _RELIST
    + _TELL_CHANGE
    + _TELL_EVENT
    + LIVE_AT_MOST
    + _COUNT_TO_QUOTA
    + """
-- KEYS: job, active jobs, epoch, events, checkpoints, history, stacks, changes, events of all jobs, then the
-- inboxes from KEYS[first_inbox] on; from KEYS[doomed] on, where a job is deleted with this: that job,
-- all jobs, deleted jobs, all else that is kept with that job
local expected, epoch, id, wake, field = take(), take(), take(), take(), take()
local doc, fence, state, active, kept = take(), take(), take(), take(), take()
local created, summary, listed = take(), take(), take()
local split_mark, parts = take(), take_list()
local first_inbox = tonumber(take())
local doomed, doomed_id, doomed_version = tonumber(take()), take(), take()
local not_ended, most_not_ended, records, most_spec_bytes = take(), take(), take(), take()
if deposed(KEYS[3], epoch) then return {'deposed', '0'} end
local types = {'hash', 'set', 'string', 'stream', 'hash', 'stream'}
if doomed > 0 then
  types[doomed], types[doomed + 1], types[doomed + 2] = 'hash', 'zset', 'set'
end
local other = mistyped(types)
if other then return {'mistyped', other} end
if doomed > 0 and redis.call('HGET', KEYS[doomed], 'version') ~= doomed_version then
  return {'stale', '0'}
end
local known = redis.call('HMGET', KEYS[1], 'version', 'fence')
if not known[1] then return {'gone', '0'} end
if not tonumber(known[2]) then return {'mistyped', KEYS[1]} end
if known[1] ~= expected or tonumber(known[2]) > tonumber(fence) then return {'stale', known[1]} end
if is_full(not_ended, most_not_ended) then return {'not_ended', most_not_ended} end
if are_too_large(not_ended, records, spec_bytes(KEYS[1]), most_spec_bytes) then return {'spec_bytes', most_spec_bytes} end
-- Parts that did not change are not in the script: they must be there.
if string.sub(redis.call('HGET', KEYS[1], 'doc') or '', 1, #split_mark) ~= split_mark then
  return {'whole', '0'}
end
for i = 1, #parts, 2 do redis.call('HSET', KEYS[1], parts[i], parts[i + 1]) end
local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'doc', doc, 'fence', fence, 'state', state, 'summary', summary)
relist(KEYS[1], id, created, listed)
if active == '1' then redis.call('SADD', KEYS[2], id) else redis.call('SREM', KEYS[2], id) end
for _, event in ipairs(take_list()) do
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', kept, '*', field, event)
  tell_event(KEYS[9], field, event, id)
end
local puts = take_list()
for i = 1, #puts, 2 do redis.call('HSET', KEYS[5], puts[i], puts[i + 1]) end
for _, name in ipairs(take_list()) do redis.call('HDEL', KEYS[5], name) end
local sends = take_list()
for i = 1, #sends, 2 do
  to_inbox(KEYS[first_inbox + tonumber(sends[i])], field, sends[i + 1])
end
local remembered = take()
for _, told in ipairs(take_list()) do
  redis.call('XADD', KEYS[6], 'MAXLEN', '~', remembered, '*', field, told)
end
local lives_s = take()
for i = 6, 7 do
  if lives_s == '' then redis.call('PERSIST', KEYS[i]) else live_at_most(KEYS[i], tonumber(lives_s)) end
end
local changes_kept = take()
tell_change(KEYS[8], changes_kept, id, version, active)
if doomed > 0 then
  redis.call('ZREM', KEYS[doomed + 1], doomed_id)
  remember_deleted(KEYS[doomed + 2], KEYS[doomed], doomed_id)
  redis.call('SREM', KEYS[2], doomed_id)
  relist(KEYS[doomed], doomed_id, 0, '')
  redis.call('DEL', KEYS[doomed])
  for i = doomed + 3, #KEYS do redis.call('DEL', KEYS[i]) end
  tell_change(KEYS[8], changes_kept, doomed_id, '', 0)
end
redis.call('PUBLISH', wake, id)
return {'ok', tostring(version)}
"""
)


CREATE: Final = (
    TAKE_LIST
    + FIND_MISTYPED
    + _RELIST
    + _TELL_CHANGE
    + _TELL_EVENT
    + _COUNT_TO_QUOTA
    + """
-- KEYS: job, all jobs, active jobs, events, idempotency, history, changes, events of all jobs, the owner's jobs that have not ended, all the owner's jobs, the claims of who asks
local other = mistyped({'hash', 'zset', 'set', 'stream', 'string', 'stream', [11] = 'zset'})
if other then return {'mistyped', other} end
local id, wake, field, doc, state, created = take(), take(), take(), take(), take(), take()
local summary, listed = take(), take()
local digest, ttl = take(), take()
local most_not_ended, most_kept, records, most_spec_bytes, most_claims = take(), take(), take(), take(), take()
if digest ~= '' then
  local claimed = redis.call('GET', KEYS[5])
  if claimed then return {'claimed', claimed} end
end
if is_full(KEYS[9], most_not_ended) then return {'not_ended', most_not_ended} end
if is_full(KEYS[10], most_kept) then return {'kept', most_kept} end
if are_too_large(KEYS[9], records, #doc, most_spec_bytes) then return {'spec_bytes', most_spec_bytes} end
if digest ~= '' then
  redis.call('SET', KEYS[5], digest .. ' ' .. doc, 'EX', ttl)
  redis.call('ZADD', KEYS[11], created, KEYS[5])
  redis.call('EXPIRE', KEYS[11], ttl)
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[11], 0, -1 - most_claims)) do
    redis.call('DEL', oldest)
    redis.call('ZREM', KEYS[11], oldest)
  end
end
redis.call('HSET', KEYS[1], 'doc', doc, 'version', '1', 'fence', '0', 'state', state, 'summary', summary)
relist(KEYS[1], id, created, listed)
redis.call('ZADD', KEYS[2], created, id)
redis.call('SADD', KEYS[3], id)
for _, event in ipairs(take_list()) do
  redis.call('XADD', KEYS[4], '*', field, event)
  tell_event(KEYS[8], field, event, id)
end
for _, told in ipairs(take_list()) do redis.call('XADD', KEYS[6], '*', field, told) end
tell_change(KEYS[7], take(), id, 1, 1)
redis.call('PUBLISH', wake, id)
return {'ok', '1'}
"""
)


RESTORE: Final = (
    REFUSE_DEPOSED
    + TAKE_LIST
    + FIND_MISTYPED
    + _RELIST
    + _TELL_CHANGE
    + _TELL_EVENT
    + """
-- KEYS: job, all jobs, active jobs, epoch, events, checkpoints, deleted jobs, history, changes,
-- events of all jobs
local epoch, id, wake, field, doc = take(), take(), take(), take(), take()
local fence, state, active, created = take(), take(), take(), take()
local summary, listed = take(), take()
if deposed(KEYS[4], epoch) then return {'deposed', '0'} end
if redis.call('EXISTS', KEYS[1]) == 1 then return {'known', '0'} end
local other = mistyped({'hash', 'zset', 'set', 'string', 'stream', 'hash', 'set', 'stream'})
if other then return {'mistyped', other} end
if redis.call('SISMEMBER', KEYS[7], id) == 1 then return {'deleted', '0'} end
redis.call('HSET', KEYS[1], 'doc', doc, 'version', '1', 'fence', fence, 'state', state, 'summary', summary)
relist(KEYS[1], id, created, listed)
redis.call('ZADD', KEYS[2], created, id)
if active == '1' then redis.call('SADD', KEYS[3], id) end
for _, event in ipairs(take_list()) do
  redis.call('XADD', KEYS[5], '*', field, event)
  tell_event(KEYS[10], field, event, id)
end
local puts = take_list()
for i = 1, #puts, 2 do redis.call('HSET', KEYS[6], puts[i], puts[i + 1]) end
for _, told in ipairs(take_list()) do redis.call('XADD', KEYS[8], '*', field, told) end
tell_change(KEYS[9], take(), id, 1, active)
redis.call('PUBLISH', wake, id)
return {'ok', '0'}
"""
)


DELETE: Final = (
    FIND_MISTYPED
    + _REMEMBER_DELETED
    + _RELIST
    + _TELL_CHANGE
    + """
-- KEYS: active jobs, job, all jobs, deleted jobs, then all else that is kept with the job; last: changes
-- ARGV: the version that it must have ('' deletes it as it is), its id, how many changes are kept
local other = mistyped({'set', nil, 'zset', 'set'})
if other then return {'mistyped', other} end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[2], 'version') ~= ARGV[1] then return {'stale', '0'} end
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('SREM', KEYS[1], ARGV[2])
remember_deleted(KEYS[4], KEYS[2], ARGV[2])
relist(KEYS[2], ARGV[2], 0, '')
redis.call('DEL', KEYS[2])
for i = 5, #KEYS - 1 do redis.call('DEL', KEYS[i]) end
tell_change(KEYS[#KEYS], ARGV[3], ARGV[2], '', 0)
return {'ok', '0'}
"""
)


LIST_JOB: Final = (
    _RELIST
    + """
-- KEYS: job, all jobs; ARGV: the version that it must have, its id, its summary and its indexes
-- ('': it cannot be read), what the names of the indexes by state begin with
local version = redis.pcall('HGET', KEYS[1], 'version')
if type(version) ~= 'string' or version ~= ARGV[1] then return 'stale' end
local created = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not created then return 'gone' end
local listed = ARGV[4]
if listed == '' then
  local state = redis.call('HGET', KEYS[1], 'state')
  listed = cjson.encode({ARGV[5] .. (state or '')})
else
  redis.call('HSET', KEYS[1], 'summary', ARGV[3])
end
relist(KEYS[1], ARGV[2], created, listed)
return 'ok'
"""
)


DIGEST_ACTIVE: Final = """
-- KEYS: active jobs; ARGV: what the names of their records begin with, whether the lines themselves are wanted
-- ('1') or their digest. The records are not named one by one: there may be thousands.
local ids = redis.call('SMEMBERS', KEYS[1])
table.sort(ids)
for i, id in ipairs(ids) do
  local version = redis.pcall('HGET', ARGV[1] .. id, 'version')
  local length = redis.pcall('HSTRLEN', ARGV[1] .. id, 'doc')
  version = type(version) == 'string' and version or ''
  ids[i] = id .. ' ' .. version .. ' ' .. (type(length) == 'number' and length or 0)
end
local lines = table.concat(ids, '\\n')
return ARGV[2] == '1' and lines or redis.sha1hex(lines)
"""


SEND: Final = (
    REFUSE_DEPOSED
    + TO_INBOX
    + """
-- KEYS: epoch, then one inbox a command; ARGV: epoch, field, then the commands
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
for i = 2, #KEYS do to_inbox(KEYS[i], ARGV[2], ARGV[i + 1]) end
return 'ok'
"""
)
