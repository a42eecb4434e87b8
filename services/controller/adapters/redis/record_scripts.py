"""The Lua scripts of curves, output and events that storage has: asked back, put together, let go."""

from typing import Final

from services.controller.adapters.redis.script_parts import LIVE_AT_MOST, TO_INBOX

# Agents add to these streams what they like. An entry that is too long is removed when it is met, and answered without
# its body: Redis takes a third of a second to hand over one of 16 MiB, and lists are read each second.
READ_RECORDS: Final = """
-- KEYS: stream; ARGV: 'XRANGE' or 'XREVRANGE', from where, how many, field, the longest body, how many are kept,
-- about how many bytes are read at once
redis.pcall('XTRIM', KEYS[1], 'MAXLEN', ARGV[6])
local length, size = redis.pcall('XLEN', KEYS[1]), redis.pcall('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0)
if type(length) ~= 'number' then return length end
local left, longest = tonumber(ARGV[3]), tonumber(ARGV[5])
local fit = type(size) == 'number' and math.floor(tonumber(ARGV[7]) * length / size) or left
local at_once, to = math.max(math.min(fit, left), 1), ARGV[1] == 'XRANGE' and '+' or '-'
local rows, from, is_long = {}, ARGV[2], false
while left > 0 and not is_long do
  local found = redis.pcall(ARGV[1], KEYS[1], from, to, 'COUNT', at_once)
  if found.err then
    -- Behind the last of all ids nothing can be.
    if string.find(found.err, 'invalid start ID') then break end
    return found
  end
  for _, row in ipairs(found) do
    -- Each further field takes time, too, though it is empty.
    local body, bytes = '', 16 * (#row[2] - 2)
    for at = 1, #row[2], 2 do
      bytes = bytes + #row[2][at] + #row[2][at + 1]
      if row[2][at] == ARGV[4] then body = row[2][at + 1] end
    end
    if bytes > longest then
      body, is_long = '', true
      redis.pcall('XDEL', KEYS[1], row[1])
    end
    rows[#rows + 1] = {row[1], body}
    from = '(' .. row[1]
  end
  if #found < at_once then break end
  left = left - at_once
end
return rows
"""

ASK_BACK: Final = """
-- KEYS: who asked, then the streams into which records are brought back
-- ARGV: who asks now, how long that holds in s
-- One that lives for ever is no controller's: any agent may write it, and none may have it run out.
if redis.call('TTL', KEYS[1]) >= 0 then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'asked', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
-- Made here, and empty: the agent appends to them only while they live, so nothing stays of them.
for i = 2, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('XGROUP', 'CREATE', KEYS[i], 'made', '$', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', KEYS[i], 'made')
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return 1
"""

TELL_AGENT: Final = (
    TO_INBOX
    + """
-- KEYS: the inbox; ARGV: field, the command
to_inbox(KEYS[1], ARGV[1], ARGV[2])
"""
)

IS_ANSWERED: Final = """
-- KEYS: who asked; ARGV: the longest question
-- One that lives for ever, or is long, is no controller's: any agent may write it. It is kept, and each request that
-- reads records reads it.
if redis.call('TTL', KEYS[1]) < 0 then return 0 end
for _, field in ipairs({'asked', 'done'}) do
  local length = redis.pcall('HSTRLEN', KEYS[1], field)
  if type(length) ~= 'number' or length > tonumber(ARGV[1]) then return 0 end
end
local said = redis.call('HMGET', KEYS[1], 'asked', 'done')
return said[1] and said[1] == said[2] and 1 or 0
"""

PUT_TOGETHER: Final = """
-- KEYS: who asked, that its records are whole, what was brought back of events, which ended jobs' records are back,
-- then each stream behind what was brought back of it
-- ARGV: how long it stays in s ('': the job has not ended), which this is, the most bytes of all that are back, for
-- how many s one stays in any case, how many entries of a stream are looked at, then what the keys of one are called,
-- the one that says that it is whole first
local function let_others_go()
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  redis.call('ZADD', KEYS[4], now, ARGV[2])
  redis.call('EXPIRE', KEYS[4], ARGV[1])
  local room, rows = tonumber(ARGV[3]), redis.call('ZREVRANGE', KEYS[4], 0, -1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local named = {}
    for j = 6, #ARGV do
      named[#named + 1] = string.format(ARGV[j], rows[i])
      local size = redis.pcall('MEMORY', 'USAGE', named[#named])
      room = room - (type(size) == 'number' and size or 0)
    end
    -- One that lives for ever is of a job that goes on, others are gone by themselves.
    if redis.call('TTL', named[1]) < 0 then
      redis.call('ZREM', KEYS[4], rows[i])
    elseif room < 0 and rows[i] ~= ARGV[2] and now - rows[i + 1] >= ARGV[4] * 1000000 then
      for _, key in ipairs(named) do
        local left = redis.call('TTL', key)
        -- What stays longer holds some that storage may not have.
        if left >= 0 and left <= tonumber(ARGV[1]) then redis.call('UNLINK', key) end
      end
      redis.call('ZREM', KEYS[4], rows[i])
    end
  end
end
local asked = redis.call('HMGET', KEYS[1], 'asked', 'done')
if not asked[1] or asked[1] ~= asked[2] then return 0 end
redis.call('DEL', KEYS[3])
for i = 5, #KEYS, 2 do
  local back, here = KEYS[i], KEYS[i + 1]
  if redis.call('EXISTS', back) == 1 and redis.call('XLEN', back) > 0 then
    local left = redis.call('TTL', here)
    -- Agents add what they like. What they write has one field; of thousands a script can make no entry.
    redis.pcall('XTRIM', here, 'MAXLEN', ARGV[5])
    local rows = redis.pcall('XRANGE', here, '-', '+')
    for _, row in ipairs(rows.err and {} or rows) do
      if #row[2] == 2 and #redis.call('XRANGE', back, row[1], row[1]) == 0 then
        local added = redis.pcall('XADD', back, row[1], unpack(row[2]))
        -- Another node's, which is in no file yet though what came later is.
        if type(added) ~= 'string' then added = redis.pcall('XADD', back, '*', unpack(row[2])) end
        -- Behind the last of all ids nothing can be.
        if type(added) ~= 'string' and not string.find(added.err, 'exhausted') then return added end
      end
    end
    redis.call('RENAME', back, here)
    if ARGV[1] ~= '' then
      redis.call('EXPIRE', here, math.max(tonumber(ARGV[1]), left))
    else
      redis.call('PERSIST', here)
    end
  else
    redis.call('DEL', back)
  end
end
redis.call('SET', KEYS[2], asked[1])
redis.call('DEL', KEYS[1])
if ARGV[1] ~= '' then
  redis.call('EXPIRE', KEYS[2], ARGV[1])
  let_others_go()
end
return 1
"""

LET_GO: Final = (
    LIVE_AT_MOST
    + """
-- KEYS: what goes; ARGV: how long it stays in s
for _, key in ipairs(KEYS) do live_at_most(key, tonumber(ARGV[1])) end
"""
)

RECORDS_CLOSED: Final = (
    LIVE_AT_MOST
    + """
local function has_ended(state)
  for i = 7, #ARGV do
    if ARGV[i] == state then return true end
  end
  return false
end
local function later(one, other)
  local ms, n = string.match(one, '(%d+)-(%d+)')
  local other_ms, other_n = string.match(other, '(%d+)-(%d+)')
  if ms == other_ms then return tonumber(n) > tonumber(other_n) end
  return tonumber(ms) > tonumber(other_ms)
end
-- KEYS: job, the last of its records, events, older events, history
-- ARGV: fence, how long it stays in s, its last steps, its last metrics, the last event that storage has
-- ('': it has none), how many of those are kept, the states in which a job has ended
local known = redis.call('HMGET', KEYS[1], 'state', 'fence')
if known[2] ~= ARGV[1] or not has_ended(known[1]) then return 'stale' end
for i, kind in ipairs({'steps', 'metrics'}) do
  if ARGV[2 + i] ~= '' then redis.call('HSET', KEYS[2], kind, ARGV[2 + i]) end
end
local rows = ARGV[5] ~= '' and redis.pcall('XRANGE', KEYS[3], '-', '+') or {}
local first = #rows - tonumber(ARGV[6]) + 1
while not rows.err and first > 1 and later(rows[first][1], ARGV[5]) do first = first - 1 end
if not rows.err and first > 1 then
  -- Rewritten: a stream that is cut keeps the memory of what is gone.
  -- Those from before an earlier closing are in storage alone.
  if redis.call('HEXISTS', KEYS[2], 'events') == 1 then
    redis.call('DEL', KEYS[3], KEYS[4])
  else
    redis.call('RENAME', KEYS[3], KEYS[4])
    redis.call('EXPIRE', KEYS[4], ARGV[2])
  end
  for i = first, #rows do redis.call('XADD', KEYS[3], rows[i][1], unpack(rows[i][2])) end
  redis.call('HSET', KEYS[2], 'events', rows[first][1])
end
for i = 4, 5 do live_at_most(KEYS[i], tonumber(ARGV[2])) end
return 'ok'
"""
)
