-- All that leasehold says to Redis: a list of operations, carried out in order, each whole or not at all.
-- Redis >= 6.0. Written so that every operation may be sent twice.
--
-- ARGV: for each operation its verb and its arguments. KEYS: for each operation its keys (counted at the end).
-- Answer: {the server's time in microseconds, {one answer for each operation}}; {'error', text} fails one alone.
--
--   k   string  <owner>#<fence>                     who has the lease; lasts as long as the lease
--   f   string  <fence>                             the largest fence given; days longer than the lease
--   q   zset    owner by ticket                     who stands in line
--   w   hash    owner -> <deadline> <presence>, ms  until when a waiter counts as alive, and for how long at a time
--   v, mark     a fenced value, and the largest fence that wrote it; neither has a TTL
--
-- An owner is <label>/<inbox>/<uuid>. Its process listens on leasehold:<inbox>, and is told
--   granted <fence> <ms> <owner>    the lease is yours for that long
--   forced <fence> <key>            the lease that you had under this fence was ended by force
-- A message is only ever an accelerator: whoever waits also asks.

local FENCE_LIFE = 7 * 24 * 3600 * 1000
local LIMIT = 9007199254740991 -- 2^53 - 1: beyond it a number of Lua's loses digits
local PURGE = 512 -- the dead that one operation may drop: a server is never held for long
local BATCH = 64
local SAMPLE = 8 -- how many of a line are looked at by each who joins it

local time = redis.call('TIME')
local us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(us / 1000)
local now = time[1] .. string.sub('00000' .. time[2], -6) -- us in digits, without the price of formatting a number

local function whole(n) return string.format('%.0f', n) end -- tostring and .. would keep 14 digits

-- what is not a plain number counts as 0: not nan, inf or hexadecimal, which tonumber would take
local function count(s) return tonumber(string.match(s or '', '^%d+$') or 0) end

local function fail(text) error({err = text}, 0) end

-- calls a command; second result: whether the key is of another type. Any other error is raised.
local function try(...)
  local r = redis.pcall(...)
  if type(r) == 'table' and r.err then
    if string.find(r.err, 'WRONGTYPE', 1, true) then return nil, true end
    error(r, 0)
  end
  return r
end

local function at_least(key, life) if redis.call('PTTL', key) < life then redis.call('PEXPIRE', key, life) end end

-- the fence in a value, if it is this owner's
local function fence_of(value, owner)
  if value and string.sub(value, 1, #owner + 1) == owner .. '#' then return string.match(value, '^[1-9]%d*$', #owner + 2) end
end

local H4 = '[0-9a-f][0-9a-f][0-9a-f][0-9a-f]'

-- label, inbox and fence of a value that any process of ours wrote: strict, so that no foreign token passes
local function ours(value)
  local uuid = H4 .. H4 .. '%-' .. H4 .. '%-' .. H4 .. '%-' .. H4 .. '%-' .. H4 .. H4 .. H4
  local label, inbox, fence = string.match(value or '', '^([^#%s%c]+)/(' .. H4 .. H4 .. H4 .. H4 .. ')/' .. uuid .. '(.*)$')
  if fence == '' then return label, inbox end
  fence = fence and string.match(fence, '^#([1-9]%d*)$')
  if fence then return label, inbox, fence end
end

-- what the server said if it would not
local function tell(inbox, message)
  local r = redis.pcall('PUBLISH', 'leasehold:' .. inbox, message)
  return type(r) == 'table' and r.err or nil
end

-- taken before the key is: an owner without a durable fence never exists. floor: a fence that the counter may have lost
local function next_fence(f, floor)
  local last = math.max(count(redis.call('GET', f)), floor)
  if last >= LIMIT then fail('FENCE the key has used up its fences: its counter is at 2^53') end
  local fence = us > last and now or whole(last + 1)
  redis.call('SET', f, fence, 'PX', FENCE_LIFE)
  return fence
end

-- the first live waiter, and how long it will count as alive: owner, left, presence. The dead before it are dropped.
-- nil and true: nobody found yet, but not all were looked at
local function first(q, w)
  local dropped, batch = 0, 1 -- mostly the first one is alive
  while dropped < PURGE do
    local owners = redis.call('ZRANGE', q, 0, batch - 1)
    if #owners == 0 then return nil end
    local records = redis.call('HMGET', w, unpack(owners))
    local head, left, presence
    local dead = #owners
    for i = 1, #owners do
      local deadline, length = string.match(records[i] or '', '^(%d+) (%d+)$')
      left, presence = (tonumber(deadline) or 0) - ms, tonumber(length) or 0
      -- more than one presence ahead: the server's clock went back, and the entry proves nothing
      if left > 0 and left <= presence then head, dead = owners[i], i - 1 break end
    end
    if dead > 0 then
      redis.call('ZREMRANGEBYRANK', q, 0, dead - 1)
      redis.call('HDEL', w, unpack(owners, 1, dead))
    end
    if head then return head, left, presence end
    dropped, batch = dropped + dead, BATCH
  end
  return nil, true
end

-- the key is free, and it is this owner's turn
local function take(k, f, owner, ttl)
  local fence = next_fence(f, 0)
  redis.call('SET', k, owner .. '#' .. fence, 'PX', ttl)
  return {'held', fence}
end

local function leave(q, w, owner)
  try('ZREM', q, owner)
  try('HDEL', w, owner) -- also without a place: the line may have been deleted by hand
end

-- drops the dead among some of those who stand in line: behind a head that lives, nobody else would
local function prune(q, w, length)
  local from = us % length
  local owners = redis.call('ZRANGE', q, from, from + SAMPLE - 1)
  local records = redis.call('HMGET', w, unpack(owners))
  for i = 1, #owners do
    local deadline = tonumber(string.match(records[i] or '', '^(%d+) ')) or 0
    if deadline <= ms then leave(q, w, owners[i]) end
  end
end

-- gives k to the first live waiter: whether there was one, and what `tell` answers. fence: the one that ends
local function grant(k, f, q, w, fence)
  local owner, _, presence = first(q, w)
  local _, inbox = ours(owner)
  if not inbox then return false end
  leave(q, w, owner) -- first: a script that has deleted something is not refused for lack of memory
  local granted = next_fence(f, count(fence))
  redis.call('SET', k, owner .. '#' .. granted, 'PX', presence) -- one presence: should it be dead, nobody loses more
  return true, tell(inbox, 'granted ' .. granted .. ' ' .. presence .. ' ' .. owner)
end

-- k is ours to give away: to the first live waiter, or to nobody. Answers what `tell` does
local function give(k, f, q, w, fence)
  local standing = redis.pcall('ZRANGE', q, 0, 0) -- mostly nobody
  if not standing.err and #standing > 0 then
    local ok, granted, untold = pcall(grant, k, f, q, w, fence)
    if ok and granted then return untold end
  end
  redis.call('DEL', k) -- nobody waits, or granting failed: released all the same
end

local ops = {}

-- line: '1' to stand in line. ticket: '' at first, then what 'queued' said, for a place that the server has lost since
-- not_after: in this server's microseconds
-- {'held', fence} {'late'} {'busy', ms or -1, label or ''} {'queued', ahead, ms or -1, fence seen, ticket, label or ''}
function ops.claim(k, f, q, w, owner, ttl, presence, line, ticket, not_after)
  ttl, presence = tonumber(ttl), tonumber(presence)
  local value, foreign = try('GET', k)
  if foreign then fail('WRONGTYPE the key holds something that is no lease and no lock') end
  local fence = fence_of(value, owner)
  if fence then
    at_least(k, ttl)
    return {'held', fence}
  end
  if us > tonumber(not_after) then return {'late'} end
  if not value and #redis.call('ZRANGE', q, 0, 0) == 0 then return take(k, f, owner, ttl) end

  local place = redis.call('ZSCORE', q, owner)
  local function present() -- every key with its TTL before the next, and the TTL only grows: others stand here too
    redis.call('HSET', w, owner, whole(ms + presence) .. ' ' .. presence)
    at_least(w, presence)
    redis.call('ZADD', q, place, owner)
    at_least(q, presence)
  end
  if place then present() end -- alive by its own account, before the dead are dropped

  local label, left, crowd = '', nil, false
  if value then
    local who, _, his = ours(value)
    label, fence, left = his and who or '', his, redis.call('PTTL', k)
  else
    local head, until_dead = first(q, w)
    if head == owner or not head and not until_dead then
      local held = take(k, f, owner, ttl)
      if place then leave(q, w, owner) end
      return held
    end
    crowd = not head -- more dead than one operation drops: whoever asks again at once drops more
    left = head and until_dead or 1
  end
  if line ~= '1' then return {'busy', left, label} end

  local stored = redis.call('GET', f)
  local seen = whole(math.max(count(stored), count(fence)))
  if not stored then
    if seen == '0' then seen = now end
    redis.call('SET', f, seen, 'PX', FENCE_LIFE)
  end
  if not place then
    local length = redis.call('ZCARD', q)
    if length >= SAMPLE then prune(q, w, length) end -- each who comes may remove some who are gone
    local last = ticket == '' and redis.call('ZREVRANGE', q, 0, 0, 'WITHSCORES')
    place = last and whole(math.max((tonumber(last[2]) or 0) + 1, us)) or ticket -- after the last, whatever the clock says
    local ok, e = pcall(present)
    if not ok then -- a place is whole or is none
      redis.pcall('ZREM', q, owner)
      redis.pcall('HDEL', w, owner)
      error(e, 0)
    end
  end
  if value and left >= 0 and left < presence then first(q, w) end -- who is first when it ends has to know
  return {'queued', crowd and 0 or redis.call('ZRANK', q, owner), left, seen, whole(tonumber(place)), label}
end

-- {'renewed'} {'gone'} {'taken'}
function ops.renew(k, owner, fence, ttl)
  local value, foreign = try('GET', k)
  if foreign then return {'taken'} end
  if not value then return {'gone'} end
  if value ~= owner .. '#' .. fence then return {'taken'} end
  at_least(k, tonumber(ttl))
  return {'renewed'}
end

-- {'released', why the next one could not be told or nil} {'gone'}
function ops.release(k, f, q, w, owner)
  local value, foreign = try('GET', k)
  local fence = fence_of(value, owner)
  if fence then return {'released', give(k, f, q, w, fence)} end -- who holds stands in no line
  leave(q, w, owner)
  -- who leaves the line before a free key passes its turn on: the next one may not stay until it would ask again
  if not value and not foreign then give(k, f, q, w) end
  return {'gone'}
end

-- whoever holds it, also another program's lock. Answers as a release
function ops.force(k, f, q, w)
  local value, foreign = try('GET', k)
  if foreign then fail('WRONGTYPE the key holds something that is no lease and no lock') end
  if not value then return {'gone'} end
  local _, inbox, fence = ours(value)
  local untold = give(k, f, q, w, fence)
  if fence then untold = tell(inbox, 'forced ' .. fence .. ' ' .. k) or untold end
  return {'released', untold}
end

-- {'free'} {'holds', ms or -1, waiters, label or '', fence or ''}
function ops.inspect(k, q)
  local value, foreign = try('GET', k)
  if not value and not foreign then return {'free'} end
  local label, _, fence = ours(value)
  return {'holds', redis.call('PTTL', k), try('ZCARD', q) or 0, fence and label or '', fence or ''}
end

local function no_lease(f)
  if redis.call('EXISTS', f) == 1 then fail('LEASE the key is a lease\'s own; keep the value under another') end
end

-- {'written'} {'stale', newest fence}
function ops.write(v, mark, f, value, fence)
  no_lease(f)
  redis.call('STRLEN', v) -- SET would write over a key of any type
  local newest = redis.call('GET', mark) or '0'
  if not string.find(newest, '^%d+$') then fail('MARK the value\'s mark is not a fence') end
  if tonumber(fence) > LIMIT then fail('FENCE a fence is smaller than 2^53') end
  if tonumber(fence) < tonumber(newest) then return {'stale', newest} end
  redis.call('SET', mark, fence) -- before the value: a value without its mark could be overwritten by a stale one
  redis.call('SET', v, value)
  return {'written'}
end

-- {'value', bytes} {'none'}
function ops.read(v, f)
  no_lease(f)
  local value = redis.call('GET', v)
  if value then return {'value', value} end
  return {'none'}
end

-- how many keys each takes, and how many arguments
local keys_of = {claim = 4, renew = 1, release = 4, force = 4, inspect = 2, write = 3, read = 2}
local args_of = {claim = 6, renew = 3, release = 1, force = 0, inspect = 0, write = 2, read = 0}
local answers, k, a = {}, 0, 0
while a < #ARGV do
  local verb = ARGV[a + 1]
  local keys, args = keys_of[verb], args_of[verb]
  local with = {unpack(KEYS, k + 1, k + keys)}
  for i = 1, args do with[keys + i] = ARGV[a + 1 + i] end
  local ok, answer = pcall(ops[verb], unpack(with))
  answers[#answers + 1] = ok and answer or {'error', type(answer) == 'table' and answer.err or tostring(answer)}
  k, a = k + keys, a + 1 + args
end
return {now, answers}
