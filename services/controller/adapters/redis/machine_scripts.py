"""The Lua scripts of nodes, of their reservations, and of the facts that their agents tell."""

from typing import Final

from services.controller.adapters.redis.script_parts import PLAIN_JSON, REFUSE_DEPOSED

_NEWEST_FACT: Final = (
    PLAIN_JSON
    + """
local function newest_fact(key, node)
  local could, known = pcall(cjson.decode, redis.call('HGET', key, node) or '')
  return could and type(known) == 'table' and known.fact_id or nil
end
"""
)


PUT_NODE: Final = (
    REFUSE_DEPOSED
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
    PLAIN_JSON
    + REFUSE_DEPOSED
    + """
-- KEYS: epoch, reservations, ended ones; ARGV: epoch, id, record, the state that it was read in ('' where
-- there was none), wake channel, how many ended ones are kept ('' : it has not ended)
-- States only go on, so one tells a record from a later one.
if deposed(KEYS[1], ARGV[1]) then return 'deposed' end
local known = redis.call('HGET', KEYS[2], ARGV[2])
local state = known and cjson.decode(known)['state'] or ''
if state ~= ARGV[4] then return 'stale' end
if ARGV[6] == '' then redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
else
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.pcall('LPUSH', KEYS[3], ARGV[3])
  redis.pcall('LTRIM', KEYS[3], 0, ARGV[6] - 1)
end
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
    REFUSE_DEPOSED
    + _NEWEST_FACT
    + """
-- KEYS: epoch, nodes, draining nodes, measured nodes, lease, beat, inbox, facts
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
redis.call('DEL', KEYS[6], KEYS[7], KEYS[8])
redis.call('PUBLISH', ARGV[4], ARGV[2])
return 'ok'
"""
)


MEASURED_NODE: Final = (
    REFUSE_DEPOSED
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
-- KEYS: facts, two lists of facts, two of their senders (of each two the older one first), nodes
-- ARGV: how many, the fields of a fact and of its sender, the longest fact (of a longer one is kept that it was),
-- about how long together, before and behind a node's id in the name of its list, how many senders may wait before
-- nodes have turns, and behind which node these begin
-- Answers how many came in the two lists, and behind which node the next turns begin.
local left, longest, room = tonumber(ARGV[1]), tonumber(ARGV[4]), tonumber(ARGV[5])
local function take(list, fact, ...)
  if type(fact) ~= 'string' then return false end
  if #fact > longest then fact = '{"kind":"too_long","bytes":' .. #fact .. '}' end
  -- Taken once it is kept: a stream to which nothing can be added must cost no fact.
  redis.call('XADD', KEYS[1], '*', ARGV[2], fact, ...)
  redis.call('LPOP', list)
  room = room - #fact
  return true
end
for i = 2, 3 do
  while left > 0 and room > 0 and take(KEYS[i], redis.call('LINDEX', KEYS[i], 0)) do left = left - 1 end
end
local of_lists, last = ARGV[1] - left, tonumber(ARGV[9])
-- One agent may add senders, and facts of its own, without end: then half of what is taken is one fact of each node.
if redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[5]) > tonumber(ARGV[8]) then
  local nodes, most = redis.pcall('HKEYS', KEYS[6]), left / 2
  for _ = 1, #nodes do
    if left <= most or room <= 0 then break end
    last = last % #nodes + 1
    local node = nodes[last]
    local list = ARGV[6] .. node .. ARGV[7]
    if take(list, redis.pcall('LINDEX', list, 0), ARGV[3], node) then left = left - 1 end
  end
end
for i = 4, 5 do
  while left > 0 and room > 0 do
    local sender = redis.call('LINDEX', KEYS[i], 0)
    if not sender then break end
    left = left - 1
    -- Any agent may name any node here: whose list has nothing, or is no list, is passed over.
    if #sender <= 64 then
      local list = ARGV[6] .. sender .. ARGV[7]
      local taken = take(list, redis.pcall('LINDEX', list, 0), ARGV[3], sender)
      -- While the senders have another type, or once they were deleted, facts wait that none of them stands for.
      local senders = redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[5])
      while taken and left > 0 and room > 0 and redis.call('LLEN', list) >= senders do
        taken = take(list, redis.call('LINDEX', list, 0), ARGV[3], sender)
        left = left - 1
      end
    end
    -- Always: who adds facts to its own list without end must not hold up those of others.
    redis.call('LPOP', KEYS[i])
  end
end
return {of_lists, last}
"""
