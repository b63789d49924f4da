-- All that leasehold says to Redis: a list of operations, carried out in order, each whole or not at all.
-- Redis >= 6.0. Written so that every operation may be sent twice.
--
-- ARGV: for each operation its verb and its arguments. KEYS: for each operation its keys (counted at the end).
-- Answer: {the server's time in microseconds, one answer for each operation}. The time is 0 if no operation needed it; an
-- empty list does. An answer is a word, or a list that begins with one; {'error', text} fails one operation alone.
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
--
-- Redis builds the functions of a script anew in each call. So what only few operations need is made within the function
-- that needs it, and numbers that go back to Redis stay text: it would format them.

local FENCE_LIFE = '604800000' -- seven days, in ms
local LIMIT = 9007199254740991 -- 2^53 - 1: beyond it a number of Lua's loses digits

local us, ms -- this call's time in microseconds and milliseconds, once it was asked for
local now = '0' -- us in digits, without the price of formatting a number

local function look_at_the_clock()
  if us then return end
  local time = redis.call('TIME')
  now = time[1] .. string.sub('00000' .. time[2], -6)
  us = tonumber(now)
  ms = math.floor(us / 1000)
end

local function whole(n) return string.format('%.0f', n) end -- tostring and .. would keep 14 digits

-- what is not a plain number counts as 0: not nan, inf or hexadecimal, which tonumber would take
local function count(s) return tonumber(string.match(s or '', '^%d+$') or 0) end

local function fail(text) error({err = text}, 0) end

-- calls a command; second result: whether the key is of another type. Any other error is raised
local function try(...)
  local r = redis.pcall(...)
  if type(r) == 'table' and r.err then
    if string.find(r.err, 'WRONGTYPE', 1, true) then return nil, true end
    error(r, 0)
  end
  return r
end

local function at_least(key, life) if redis.call('PTTL', key) < tonumber(life) then redis.call('PEXPIRE', key, life) end end

-- the same for a lease; written though it changes nothing: WAIT goes by the last write of its connection, and whoever
-- counts replicas behind this has to count those that have the lease
local function prolong(k, ttl)
  local left = redis.call('PTTL', k)
  redis.call('PEXPIRE', k, left > tonumber(ttl) and whole(left) or ttl)
end

-- the fence in a value, if it is this owner's
local function fence_of(value, owner)
  if value and string.sub(value, 1, #owner + 1) == owner .. '#' then return string.match(value, '^[1-9]%d*$', #owner + 2) end
end

-- larger than the counter and than floor, a fence that the counter may have lost
local function fence_above(f, floor)
  look_at_the_clock()
  local last = math.max(count(redis.call('GET', f)), floor)
  if last >= LIMIT then fail('FENCE the key has used up its fences: its counter is at 2^53') end
  return us > last and now or whole(last + 1)
end

-- taken before the key is: an owner without a durable fence never exists
local function next_fence(f, floor)
  local fence = fence_above(f, floor)
  redis.call('SET', f, fence, 'PX', FENCE_LIFE)
  return fence
end

-- the key is free, and it is this owner's turn
local function take(k, f, owner, ttl)
  local fence = next_fence(f, 0)
  redis.call('SET', k, owner .. '#' .. fence, 'PX', ttl)
  return {'held', fence}
end

-- label, inbox and fence of a value that any process of ours wrote: strict, so that no foreign token passes
local function ours(value)
  local H4 = '[0-9a-f][0-9a-f][0-9a-f][0-9a-f]'
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

-- those who stand in line for a key
local function line_of(q, w)
  local PURGE = 512 -- the dead that one operation may drop: a server is never held for long
  local BATCH = 64
  local SAMPLE = 8 -- how many of a line are looked at by each who joins it
  local line = {}
  look_at_the_clock()

  function line.leave(owner)
    try('ZREM', q, owner)
    try('HDEL', w, owner) -- also without a place: the line may have been deleted by hand
  end

  -- the first live waiter, and how long it will count as alive: owner, left, presence. The dead before it are dropped.
  -- nil and true: nobody found yet, but not all were looked at
  function line.first()
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

  -- drops the dead among some of those who stand in line: behind a head that lives, nobody else would
  local function prune(length)
    local from = us % length
    local owners = redis.call('ZRANGE', q, from, from + SAMPLE - 1)
    local records = redis.call('HMGET', w, unpack(owners))
    for i = 1, #owners do
      local deadline = tonumber(string.match(records[i] or '', '^(%d+) ')) or 0
      if deadline <= ms then line.leave(owners[i]) end
    end
  end

  -- every key with its TTL before the next, and the TTL only grows: others stand here too
  function line.present(owner, place, presence)
    redis.call('HSET', w, owner, whole(ms + presence) .. ' ' .. presence)
    at_least(w, presence)
    redis.call('ZADD', q, place, owner)
    at_least(q, presence)
  end

  -- a place behind the others, or the one that a ticket proves
  function line.join(owner, ticket, presence)
    local length = redis.call('ZCARD', q)
    if length >= SAMPLE then prune(length) end -- each who comes may remove some who are gone
    local place = ticket
    if ticket == '' then
      local last = redis.call('ZREVRANGE', q, 0, 0, 'WITHSCORES')
      place = whole(math.max((tonumber(last[2]) or 0) + 1, us)) -- after the last, whatever the clock says
    end
    local ok, e = pcall(line.present, owner, place, presence)
    if not ok then -- a place is whole or is none
      redis.pcall('ZREM', q, owner)
      redis.pcall('HDEL', w, owner)
      error(e, 0)
    end
    return place
  end

  return line
end

-- gives k to the first live waiter: whether there was one, and what `tell` answers. fence: the one that ends
local function grant(k, f, q, w, fence)
  local line = line_of(q, w)
  local owner, _, presence = line.first()
  local _, inbox = ours(owner)
  if not inbox then return false end
  line.leave(owner) -- first: a script that has deleted something is not refused for lack of memory
  local granted = next_fence(f, count(fence))
  redis.call('SET', k, owner .. '#' .. granted, 'PX', presence) -- one presence: should it be dead, nobody loses more
  return true, tell(inbox, 'granted ' .. granted .. ' ' .. presence .. ' ' .. owner)
end

-- k is ours to give away: to the first live waiter, or to nobody. Answers what `tell` does
local function give(k, f, q, w, fence)
  if redis.call('EXISTS', q) == 1 then
    local ok, granted, untold = pcall(grant, k, f, q, w, fence)
    if ok and granted then return untold end
  end
  redis.call('DEL', k) -- nobody waits, or granting failed: released all the same
end

-- line: '1' to stand in line. ticket: '' at first, then what 'queued' said, for a place that the server has lost since
-- not_after: in this server's microseconds
-- {'held', fence} 'late' {'busy', ms or -1, label or ''} {'queued', ahead, ms or -1, fence seen, ticket, label or ''}
local function claim(k, f, q, w, owner, ttl, presence, in_line, ticket, not_after)
  look_at_the_clock()
  local late = us > tonumber(not_after)
  if redis.call('EXISTS', k, q) == 0 then -- mostly
    if late then return 'late' end
    return take(k, f, owner, ttl)
  end
  local value, foreign = try('GET', k)
  if foreign then fail('WRONGTYPE the key holds something that is no lease and no lock') end
  local fence = fence_of(value, owner)
  if fence then
    prolong(k, ttl)
    return {'held', fence}
  end
  if late then return 'late' end

  presence = tonumber(presence)
  local line = line_of(q, w)
  local place = redis.call('ZSCORE', q, owner)
  if place then line.present(owner, place, presence) end -- alive by its own account, before the dead are dropped

  local label, left, crowd = '', nil, false
  if value then
    local who, _, his = ours(value)
    label, fence, left = his and who or '', his, redis.call('PTTL', k)
  else
    local head, until_dead = line.first()
    if head == owner or not head and not until_dead then
      local held = take(k, f, owner, ttl)
      if place then line.leave(owner) end
      return held
    end
    crowd = not head -- more dead than one operation drops: whoever asks again at once drops more
    left = head and until_dead or 1
  end
  if in_line ~= '1' then return {'busy', left, label} end

  local stored = redis.call('GET', f)
  local seen = whole(math.max(count(stored), count(fence)))
  if not stored then
    if seen == '0' then seen = now end
    redis.call('SET', f, seen, 'PX', FENCE_LIFE)
  end
  place = place or line.join(owner, ticket, presence)
  if value and left >= 0 and left < presence then line.first() end -- who is first when it ends has to know
  return {'queued', crowd and 0 or redis.call('ZRANK', q, owner), left, seen, whole(tonumber(place)), label}
end

-- 'renewed' 'gone' 'taken'
local function renew(k, _, _, _, owner, fence, ttl)
  local value, foreign = try('GET', k)
  if foreign then return 'taken' end
  if not value then return 'gone' end
  if value ~= owner .. '#' .. fence then return 'taken' end
  prolong(k, ttl)
  return 'renewed'
end

-- {'released', why the next one could not be told or nil} 'gone'
local function release(k, f, q, w, owner)
  local value, foreign = try('GET', k)
  local fence = fence_of(value, owner)
  if fence then return {'released', give(k, f, q, w, fence)} end -- who holds stands in no line
  line_of(q, w).leave(owner)
  -- who leaves the line before a free key passes its turn on: the next one may not stay until it would ask again
  if not value and not foreign then give(k, f, q, w) end
  return 'gone'
end

-- what is asked now and then: the operation, and how many keys and how many arguments it takes
local function seldom(verb)
  -- whoever holds it, also another program's lock. Answers as a release
  local function force(k, f, q, w)
    local value, foreign = try('GET', k)
    if foreign then fail('WRONGTYPE the key holds something that is no lease and no lock') end
    if not value then return 'gone' end
    local _, inbox, fence = ours(value)
    -- overtakes it: in a quorum, its holder would put the lease back with the next renewal
    pcall(next_fence, f, count(fence))
    local untold = give(k, f, q, w, fence)
    if fence then untold = tell(inbox, 'forced ' .. fence .. ' ' .. k) or untold end
    return {'released', untold}
  end

  -- 'free' {'holds', ms or -1, waiters, label or '', fence or ''}
  local function inspect(k, q)
    local value, foreign = try('GET', k)
    if not value and not foreign then return 'free' end
    local label, _, fence = ours(value)
    return {'holds', redis.call('PTTL', k), try('ZCARD', q) or 0, fence and label or '', fence or ''}
  end

  local function no_lease(f)
    if redis.call('EXISTS', f) == 1 then fail('LEASE the key is a lease\'s own; keep the value under another') end
  end

  -- 'written' {'stale', newest fence}
  local function write(v, mark, f, _, value, fence)
    no_lease(f)
    redis.call('STRLEN', v) -- SET would write over a key of any type
    local newest = redis.call('GET', mark) or '0'
    if not string.find(newest, '^%d+$') then fail('MARK the value\'s mark is not a fence') end
    if tonumber(fence) > LIMIT then fail('FENCE a fence is smaller than 2^53') end
    if tonumber(fence) < tonumber(newest) then return {'stale', newest} end
    redis.call('SET', mark, fence) -- before the value: a value without its mark could be overwritten by a stale one
    redis.call('SET', v, value)
    return 'written'
  end

  -- {'value', bytes} 'none'
  local function read(v, f)
    no_lease(f)
    local value = redis.call('GET', v)
    return value and {'value', value} or 'none'
  end

  if verb == 'force' then return force, 4, 0 end
  if verb == 'inspect' then return inspect, 2, 0 end
  if verb == 'write' then return write, 3, 2 end
  if verb == 'read' then return read, 2, 0 end
end

-- what a member of a quorum is asked: the operation, and how many keys and how many arguments it takes
local function in_a_quorum(verb)
  -- a proposal leaves f as it is: only what a majority writes back is a fence. settled: the least age of the server, in ms
  -- {'held', fence} 'late' {'young', ms} {'busy', ms or -1, label or ''}
  local function propose(k, f, _, _, owner, ttl, settled, not_after)
    look_at_the_clock()
    local value, foreign = try('GET', k)
    if foreign then fail('WRONGTYPE the key holds something that is no lease and no lock') end
    local fence = fence_of(value, owner)
    if fence then
      at_least(k, ttl)
      return {'held', fence}
    end
    if us > tonumber(not_after) then return 'late' end
    if value then
      local who, _, his = ours(value)
      return {'busy', redis.call('PTTL', k), his and who or ''}
    end
    if settled ~= '0' then
      local age = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
      if not age then fail('UPTIME the server does not say how long it has been running') end
      local left = tonumber(settled) - 1000 * (tonumber(age) - 1) -- counts seconds begun: it may be one younger
      if left > 0 then return {'young', left} end
    end
    fence = fence_above(f, 0)
    redis.call('SET', k, owner .. '#' .. fence, 'PX', ttl)
    return {'held', fence}
  end

  -- writes the fence back, renews, and (create: '1') puts the lease back where it is missing, but not under a fence that
  -- another has overtaken: 'renewed' 'gone' 'taken' 'late'
  local function hold(k, f, _, _, owner, fence, ttl, create, not_after)
    local value, foreign = try('GET', k)
    local mine = fence_of(value, owner)
    if foreign or value and not mine then return 'taken' end
    if count(redis.call('GET', f)) > tonumber(fence) then return mine and 'taken' or 'gone' end
    if mine then
      local left = redis.call('PTTL', k)
      if left > tonumber(ttl) then ttl = whole(left) end
    else
      if create ~= '1' then return 'gone' end
      look_at_the_clock()
      if us > tonumber(not_after) then return 'late' end
    end
    redis.call('SET', f, fence, 'PX', FENCE_LIFE) -- before the lease: none stands at a member that may forget its fence
    redis.call('SET', k, owner .. '#' .. fence, 'PX', ttl)
    return 'renewed'
  end

  if verb == 'propose' then return propose, 2, 4 end
  return hold, 2, 5
end

local function operation(verb)
  if verb == 'claim' then return claim, 4, 6 end
  if verb == 'release' then return release, 4, 1 end
  if verb == 'renew' then return renew, 1, 3 end
  if verb == 'propose' or verb == 'hold' then return in_a_quorum(verb) end
  return seldom(verb)
end

if #ARGV == 0 then look_at_the_clock() end
local answers, k, a = {now}, 0, 0
while a < #ARGV do
  local carry_out, keys, args = operation(ARGV[a + 1])
  -- as many as any takes; it looks at its own, arguments after four keys
  local ok, answer = pcall(carry_out, KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4],
    ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5], ARGV[a + 6], ARGV[a + 7])
  answers[#answers + 1] = ok and answer or {'error', type(answer) == 'table' and answer.err or tostring(answer)}
  k, a = k + keys, a + 1 + args
end
answers[1] = now
return answers
