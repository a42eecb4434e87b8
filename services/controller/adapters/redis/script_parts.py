"""What the Lua scripts share. Each script is one decision's whole write: a crash leaves no half of it.

A script is not given all keys that it comes to: the indexes that a job leaves are named in its record, and the
records of the active jobs in their set. So all keys are of one server: Redis Cluster is not supported.
"""

import re
from typing import Final

from services.contract.redis import redis_keys as keys

_COMMAND: Final = re.compile(r"redis\.p?call\('([A-Z]+)'")


# Asked about a command without its arguments, Redis 7.0 reads beyond them, and may crash.
_CHECK_RIGHTS: Final = """
local asked = {
  XGROUP = {'CREATE', KEYS[1], 'x', '$'}, PUBLISH = {'%(channel)s', ''}, TIME = {}, MEMORY = {'USAGE', KEYS[1]},
}
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


# Whoever may run scripts sets this for those of all users, as long as the server lives: it is set to what Redis has
# by itself, for a record that cannot be decoded counts as none.
PLAIN_JSON: Final = """
cjson.decode_max_depth(1000)
"""


REFUSE_DEPOSED: Final = """
local function deposed(key, epoch)
  return epoch ~= '' and redis.call('GET', key) ~= epoch
end
"""


TAKE_LIST: Final = """
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
FIND_MISTYPED: Final = """
local function mistyped(types)
  for i, wanted in pairs(types) do
    local is = redis.call('TYPE', KEYS[i]).ok
    if is ~= 'none' and is ~= wanted then return KEYS[i] end
  end
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


# Of a job that has ended what goes sooner, for storage has it, goes no later for what is done with it.
LIVE_AT_MOST: Final = """
local function live_at_most(key, seconds)
  local left = redis.call('TTL', key)
  if left < 0 or left > seconds then redis.call('EXPIRE', key, seconds) end
end
"""
