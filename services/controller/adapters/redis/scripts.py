"""The Lua scripts: each is one decision's whole write, so that a crash leaves no half of it."""

import re
from typing import Final

from services.contract.redis import redis_keys as keys

_COMMAND: Final = re.compile(r"redis\.p?call\('([A-Z]+)'")
# Asked about a command without its arguments, Redis 7.0 reads beyond them, and may crash.
_CHECK_RIGHTS: Final = """
local asked = {XGROUP = {'CREATE', KEYS[1], 'x', '$'}, PUBLISH = {'%(channel)s', ''}, TIME = {}}
for _, name in ipairs({%(names)s}) do
  local with = asked[name] or {KEYS[1], KEYS[1], KEYS[1]}
  if redis.acl_check_cmd and not redis.acl_check_cmd(name, unpack(with)) then
    return redis.error_reply('NOPERM this user may not run ' .. name)
  end
end
"""


def checked(script: str) -> str:
    """The script, which does nothing unless its user may run all commands that it may come to.

    Redis takes nothing back of a script that it stops half-way. What else it refuses (no memory, a
    replica, a disk) it refuses at a script's first write.
    """
    names = ", ".join(f"'{name}'" for name in sorted(set(_COMMAND.findall(script))))
    return _CHECK_RIGHTS % {"names": names, "channel": keys.WAKE} + script


_REFUSE_DEPOSED: Final = """
local function deposed(key, epoch)
  return epoch ~= '' and redis.call('GET', key) ~= epoch
end
"""

_TAKE_LIST: Final = """
local cursor = 0
local function take()
  cursor = cursor + 1
  return ARGV[cursor]
end
local function take_list()
  local list = {}
  for i = 1, tonumber(take()) do list[i] = take() end
  return list
end
"""

# Redis takes nothing back of a script that fails half-way: what could fail is looked at before.
_FIND_MISTYPED: Final = """
local function mistyped(types)
  for i, wanted in pairs(types) do
    local is = redis.call('TYPE', KEYS[i]).ok
    if is ~= 'none' and is ~= wanted then return KEYS[i] end
  end
end
"""

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
_RELIST: Final = """
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

# The inbox is its agent's: one that it gave another type, or the last id, costs that agent its commands,
# and nobody else. What Redis refuses to all is no doing of the agent's.
TO_INBOX: Final = """
local function to_inbox(key, field, command)
  local told = redis.pcall('XADD', key, '*', field, command)
  if type(told) ~= 'table' then return end
  local is_spoilt = string.find(told.err, '^WRONGTYPE') or string.find(told.err, '^ERR The stream')
  if not is_spoilt then redis.call('XADD', key, '*', field, command) end
end
"""

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
"""

# Of a job that has ended what goes sooner, for storage has it, goes no later for what is done with it.
LIVE_AT_MOST: Final = """
local function live_at_most(key, seconds)
  local left = redis.call('TTL', key)
  if left < 0 or left > seconds then redis.call('EXPIRE', key, seconds) end
end
"""

COMMIT: Final = (
    _REFUSE_DEPOSED
    + _REMEMBER_DELETED
    + _TAKE_LIST
    + _FIND_MISTYPED
    + TO_INBOX
    + _RELIST
    + _TELL_CHANGE
    + _TELL_EVENT
    + LIVE_AT_MOST
    + _COUNT_TO_QUOTA
    + """
-- KEYS: job, active jobs, epoch, events, checkpoints, history, ranks, steps, logs, stacks, metrics, that
-- these are whole, changes, events of all jobs, then the inboxes from KEYS[first_inbox] on; from KEYS[doomed] on, where a job is deleted with this: that job,
-- all jobs, deleted jobs, all else that is kept with that job
local expected, epoch, id, wake, field = take(), take(), take(), take(), take()
local doc, fence, state, active, kept = take(), take(), take(), take(), take()
local created, summary, listed = take(), take(), take()
local split_mark, parts = take(), take_list()
local first_inbox = tonumber(take())
local doomed, doomed_id, doomed_version = tonumber(take()), take(), take()
local not_ended, most_not_ended = take(), take()
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
  tell_event(KEYS[14], field, event, id)
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
for i = 6, 12 do
  if lives_s == '' then redis.call('PERSIST', KEYS[i]) else live_at_most(KEYS[i], tonumber(lives_s)) end
end
local changes_kept = take()
tell_change(KEYS[13], changes_kept, id, version, active)
if doomed > 0 then
  redis.call('ZREM', KEYS[doomed + 1], doomed_id)
  remember_deleted(KEYS[doomed + 2], KEYS[doomed], doomed_id)
  redis.call('SREM', KEYS[2], doomed_id)
  relist(KEYS[doomed], doomed_id, 0, '')
  redis.call('DEL', KEYS[doomed])
  for i = doomed + 3, #KEYS do redis.call('DEL', KEYS[i]) end
  tell_change(KEYS[13], changes_kept, doomed_id, '', 0)
end
redis.call('PUBLISH', wake, id)
return {'ok', tostring(version)}
"""
)

CREATE: Final = (
    _TAKE_LIST
    + _FIND_MISTYPED
    + _RELIST
    + _TELL_CHANGE
    + _TELL_EVENT
    + _COUNT_TO_QUOTA
    + """
-- KEYS: job, all jobs, active jobs, events, idempotency, history, changes, that its records are whole,
-- events of all jobs, the owner's jobs that have not ended, all the owner's jobs, the claims of who asks
local other = mistyped({'hash', 'zset', 'set', 'stream', 'string', 'stream', [12] = 'zset'})
if other then return {'mistyped', other} end
local id, wake, field, doc, state, created = take(), take(), take(), take(), take(), take()
local summary, listed = take(), take()
local digest, ttl = take(), take()
local most_not_ended, most_kept, most_claims = take(), take(), take()
if digest ~= '' then
  local claimed = redis.call('GET', KEYS[5])
  if claimed then return {'claimed', claimed} end
end
if is_full(KEYS[10], most_not_ended) then return {'not_ended', most_not_ended} end
if is_full(KEYS[11], most_kept) then return {'kept', most_kept} end
if digest ~= '' then
  redis.call('SET', KEYS[5], digest .. ' ' .. doc, 'EX', ttl)
  redis.call('ZADD', KEYS[12], created, KEYS[5])
  redis.call('EXPIRE', KEYS[12], ttl)
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[12], 0, -1 - most_claims)) do
    redis.call('DEL', oldest)
    redis.call('ZREM', KEYS[12], oldest)
  end
end
redis.call('HSET', KEYS[1], 'doc', doc, 'version', '1', 'fence', '0', 'state', state, 'summary', summary)
relist(KEYS[1], id, created, listed)
redis.call('ZADD', KEYS[2], created, id)
redis.call('SADD', KEYS[3], id)
for _, event in ipairs(take_list()) do
  redis.call('XADD', KEYS[4], '*', field, event)
  tell_event(KEYS[9], field, event, id)
end
for _, told in ipairs(take_list()) do redis.call('XADD', KEYS[6], '*', field, told) end
redis.call('SET', KEYS[8], '1')
tell_change(KEYS[7], take(), id, 1, 1)
redis.call('PUBLISH', wake, id)
return {'ok', '1'}
"""
)

RESTORE: Final = (
    _REFUSE_DEPOSED
    + _TAKE_LIST
    + _FIND_MISTYPED
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
    _FIND_MISTYPED
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
-- KEYS: active jobs; ARGV: what the names of their records begin with
-- The records are not named one by one: there may be thousands.
local ids = redis.call('SMEMBERS', KEYS[1])
table.sort(ids)
for i, id in ipairs(ids) do
  local version = redis.pcall('HGET', ARGV[1] .. id, 'version')
  local length = redis.pcall('HSTRLEN', ARGV[1] .. id, 'doc')
  version = type(version) == 'string' and version or ''
  ids[i] = id .. ' ' .. version .. ' ' .. (type(length) == 'number' and length or 0)
end
return redis.sha1hex(table.concat(ids, '\\n'))
"""

SEND: Final = (
    _REFUSE_DEPOSED
    + TO_INBOX
    + """
-- KEYS: epoch, then one inbox a command; ARGV: epoch, field, then the commands
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
for i = 2, #KEYS do to_inbox(KEYS[i], ARGV[2], ARGV[i + 1]) end
return 'ok'
"""
)

_NEWEST_FACT: Final = """
local function newest_fact(key, node)
  local could, known = pcall(cjson.decode, redis.call('HGET', key, node) or '')
  return could and type(known) == 'table' and known.fact_id or nil
end
"""

PUT_NODE: Final = (
    _REFUSE_DEPOSED
    + _NEWEST_FACT
    + """
-- KEYS: epoch, nodes; ARGV: epoch, node id, record, wake channel, the fact that was the newest
-- ('' writes in any case)
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
if ARGV[5] ~= '' and newest_fact(KEYS[2], ARGV[2]) ~= ARGV[5] then return 'stale' end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[2])
return 'ok'
"""
)

PUT_RESERVATION: Final = (
    _REFUSE_DEPOSED
    + """
-- KEYS: epoch, reservations; ARGV: epoch, id, record ('' removes it), the state it was read in
-- ('' where there was none), wake channel. States only go on, so one tells a record from a later one.
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
local known = redis.call('HGET', KEYS[2], ARGV[2])
local state = known and cjson.decode(known)['state'] or ''
if state ~= ARGV[4] then return 'stale' end
if ARGV[3] == '' then redis.call('HDEL', KEYS[2], ARGV[2])
else redis.call('HSET', KEYS[2], ARGV[2], ARGV[3]) end
redis.call('PUBLISH', ARGV[5], ARGV[2])
return 'ok'
"""
)

LEASES: Final = """
-- KEYS: leases; ARGV: how much is read of each, which its agent may have made half a GiB
-- Answers who holds each, and how long yet; -2: nobody, -3: it has another type.
local holders, left = {}, {}
for i, key in ipairs(KEYS) do
  local holder = redis.pcall('GETRANGE', key, 0, ARGV[1])
  local is_text = type(holder) == 'string'
  holders[i] = is_text and holder or ''
  left[i] = is_text and redis.call('PTTL', key) or -3
end
return {holders, left}
"""

FORGET_NODE: Final = (
    _REFUSE_DEPOSED
    + _NEWEST_FACT
    + """
-- KEYS: epoch, nodes, draining nodes, measured nodes, lease, beat, inbox
-- ARGV: epoch, node id, the fact that was the newest, wake channel
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
if newest_fact(KEYS[2], ARGV[2]) ~= ARGV[3] or redis.call('EXISTS', KEYS[5]) == 1 then
  return 'stale'
end
redis.call('HDEL', KEYS[2], ARGV[2])
-- Those beside the record may be of another type, which is no reason to keep it.
redis.pcall('HDEL', KEYS[3], ARGV[2])
local measured = redis.pcall('HKEYS', KEYS[4])
for _, field in ipairs(measured.err and {} or measured) do
  if string.sub(field, 1, #ARGV[2] + 1) == ARGV[2] .. '/' then redis.call('HDEL', KEYS[4], field) end
end
redis.call('DEL', KEYS[6], KEYS[7])
redis.call('PUBLISH', ARGV[4], ARGV[2])
return 'ok'
"""
)

MEASURED_NODE: Final = (
    _REFUSE_DEPOSED
    + """
-- KEYS: epoch, measured nodes, that it was asked; ARGV: epoch, field, record, wake channel
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
redis.call('DEL', KEYS[3])
local kept = redis.pcall('HSET', KEYS[2], ARGV[2], ARGV[3])
if type(kept) == 'table' then return 'mistyped' end
redis.call('PUBLISH', ARGV[4], ARGV[2])
return 'ok'
"""
)

KEEP_PLAN: Final = (
    _TAKE_LIST
    + TO_INBOX
    + """
-- KEYS: plan, answer, that it was asked, inbox, that measuring was asked, inbox for that, all plans, the
-- owner's plans
local doc, state, ttl, fresh, field = take(), take(), take(), take(), take()
local patience, question, measuring, measure = take(), take(), take(), take()
local id, created, forgotten = take(), take(), take()
local probing, prefix, most = take(), take(), take()
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
if not redis.call('SET', KEYS[3], '1', 'NX', 'PX', patience) then return 'pending' end
to_inbox(KEYS[4], field, question)
return 'asked'
"""
)

CONCLUDE_PLAN: Final = """
-- KEYS: plan; ARGV: the state that it must be in, record, state
local known = redis.call('HMGET', KEYS[1], 'state', 'doc')
if not known[1] then return {'gone', ''} end
if known[1] ~= ARGV[1] then return {'known', known[2]} end
redis.call('HSET', KEYS[1], 'doc', ARGV[2], 'state', ARGV[3])
return {'ok', ''}
"""

KEEP_ANSWER: Final = (
    _REFUSE_DEPOSED
    + """
-- KEYS: epoch, answer, that it was asked; ARGV: epoch, record, its life in s
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('DEL', KEYS[3])
return 'ok'
"""
)

DRAIN_NODE: Final = """
-- KEYS: nodes, draining nodes; ARGV: node id, record ('' to forget it), wake channel
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'gone' end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 'ok'
"""

TAKE_FACTS: Final = """
-- KEYS: facts, then the lists from which they are taken, the older ones first
-- ARGV: how many, field, the longest fact (of a longer one is kept that it was), about how long together
local left, longest, room = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
for i = 2, #KEYS do
  while left > 0 and room > 0 do
    -- Taken once it is kept: a stream to which nothing can be added must cost no fact.
    local fact = redis.call('LINDEX', KEYS[i], 0)
    if not fact then break end
    if #fact > longest then fact = '{"kind":"too_long","bytes":' .. #fact .. '}' end
    redis.call('XADD', KEYS[1], '*', ARGV[2], fact)
    redis.call('LPOP', KEYS[i])
    left, room = left - 1, room - #fact
  end
end
"""

TAKE_LEAD: Final = """
-- KEYS: leader, epoch; ARGV: holder, lease in ms
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  redis.call('GET', KEYS[1])  -- what is no lease would never run out: this says so
  return 0
end
return redis.call('INCR', KEYS[2])
"""

RENEW_LEAD: Final = """
-- KEYS: leader; ARGV: holder, lease in ms
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
-- A write, as all decisions are: a Redis that refuses those ends the term, and so says why.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

RELEASE_LEAD: Final = """
-- KEYS: leader; ARGV: holder
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
