"""The Lua scripts of curves, output and events that storage has: asked back, put together, let go."""

from typing import Final

from services.controller.adapters.redis.script_parts import LIVE_AT_MOST, TO_INBOX

ASK_BACK: Final = (
    TO_INBOX
    + """
-- KEYS: who asked, the inbox, then the streams into which records are brought back
-- ARGV: who asks now, how long that holds in s, field, the command
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'asked', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
-- Made here, and empty: the agent appends to them only while they live, so nothing stays of them.
for i = 3, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('XGROUP', 'CREATE', KEYS[i], 'made', '$', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', KEYS[i], 'made')
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
to_inbox(KEYS[2], ARGV[3], ARGV[4])
return 1
"""
)

_HAS_ENDED: Final = """
local function has_ended(state, first)
  for i = first, #ARGV do
    if ARGV[i] == state then return true end
  end
  return false
end
"""

PUT_TOGETHER: Final = (
    _HAS_ENDED
    + """
-- KEYS: who asked, job, that its records are whole, older events behind what was brought back of them,
-- then each stream behind what was brought back of it
-- ARGV: how long it stays of a job that has ended in s, then the states in which a job has
local asked = redis.call('HMGET', KEYS[1], 'asked', 'done')
if not asked[1] or asked[1] ~= asked[2] then return 0 end
local state = redis.call('HGET', KEYS[2], 'state')
local ended = has_ended(state, 2)
if redis.call('EXISTS', KEYS[4]) == 1 and redis.call('XLEN', KEYS[4]) > 0 then
  -- Beside the controller's own, which no agent writes.
  redis.call('RENAME', KEYS[4], KEYS[5])
  redis.call('EXPIRE', KEYS[5], ARGV[1])
else
  redis.call('DEL', KEYS[4])
end
for i = 6, #KEYS, 2 do
  local back, here = KEYS[i], KEYS[i + 1]
  if redis.call('EXISTS', back) == 1 and redis.call('XLEN', back) > 0 then
    local left = redis.call('TTL', here)
    local rows = redis.pcall('XRANGE', here, '-', '+')
    for _, row in ipairs(rows.err and {} or rows) do
      if #redis.call('XRANGE', back, row[1], row[1]) == 0 then
        local added = redis.pcall('XADD', back, row[1], unpack(row[2]))
        -- Another node's, which is in no file yet though what came later is.
        if type(added) ~= 'string' then redis.call('XADD', back, '*', unpack(row[2])) end
      end
    end
    redis.call('RENAME', back, here)
    if ended then
      redis.call('EXPIRE', here, math.max(tonumber(ARGV[1]), left))
    else
      redis.call('PERSIST', here)
    end
  else
    redis.call('DEL', back)
  end
end
redis.call('SET', KEYS[3], '1')
if ended then redis.call('EXPIRE', KEYS[3], ARGV[1]) end
redis.call('DEL', KEYS[1])
return 1
"""
)

RECORDS_CLOSED: Final = (
    _HAS_ENDED
    + LIVE_AT_MOST
    + """
local function later(one, other)
  local ms, n = string.match(one, '(%d+)-(%d+)')
  local other_ms, other_n = string.match(other, '(%d+)-(%d+)')
  if ms == other_ms then return tonumber(n) > tonumber(other_n) end
  return tonumber(ms) > tonumber(other_ms)
end
-- KEYS: job, the last of them, steps, metrics, events, older events, then all else that goes
-- ARGV: fence, how long it stays in s, how many of the last are kept, field, the last event that storage has
-- ('': it has none), how many of those are kept, the states in which a job has ended
local known = redis.call('HMGET', KEYS[1], 'state', 'fence')
if known[2] ~= ARGV[1] or not has_ended(known[1], 7) then return 'stale' end
for i, kind in ipairs({'steps', 'metrics'}) do
  local rows = redis.pcall('XREVRANGE', KEYS[2 + i], '+', '-', 'COUNT', ARGV[3])
  local texts = {}
  for _, row in ipairs(rows.err and {} or rows) do
    for at = 1, #row[2], 2 do
      if row[2][at] == ARGV[4] then table.insert(texts, 1, row[2][at + 1]) end
    end
  end
  if #texts > 0 then redis.call('HSET', KEYS[2], kind, table.concat(texts, '\\n')) end
end
local rows = ARGV[5] ~= '' and redis.pcall('XRANGE', KEYS[5], '-', '+') or {}
local first = #rows - tonumber(ARGV[6]) + 1
while not rows.err and first > 1 and later(rows[first][1], ARGV[5]) do first = first - 1 end
if not rows.err and first > 1 then
  -- Rewritten: a stream that is cut keeps the memory of what is gone.
  -- Those from before an earlier closing are in storage alone.
  if redis.call('HEXISTS', KEYS[2], 'events') == 1 then
    redis.call('DEL', KEYS[5], KEYS[6])
  else
    redis.call('RENAME', KEYS[5], KEYS[6])
    redis.call('EXPIRE', KEYS[6], ARGV[2])
  end
  for i = first, #rows do redis.call('XADD', KEYS[5], rows[i][1], unpack(rows[i][2])) end
  redis.call('HSET', KEYS[2], 'events', rows[first][1])
end
for _, i in ipairs({3, 4}) do live_at_most(KEYS[i], tonumber(ARGV[2])) end
for i = 7, #KEYS do live_at_most(KEYS[i], tonumber(ARGV[2])) end
return 'ok'
"""
)
