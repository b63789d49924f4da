-- Goes before the page when some keys of an operation are at one server and some at another: it is told that there are
-- none but the first, which it may look at, prolong and delete. ARGV as before `asking.lua`.
local first, KEYS, ARGV = KEYS[1], {KEYS[1], unpack(ARGV, 2, ARGV[1] + 1)}, {unpack(ARGV, ARGV[1] + 2)}
local function of_the_first(call)
  return function(command, key, ...)
    if command == 'TIME' then return call(command) end
    if command == 'EXISTS' then return key == first and call(command, first) or 0 end
    if command == 'PUBLISH' or key == first then return call(command, key, ...) end
    return command == 'ZCARD' and 0 -- else false, which is nothing
  end
end
local redis = {call = of_the_first(redis.call), pcall = of_the_first(redis.pcall)}
