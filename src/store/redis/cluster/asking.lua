-- Goes before the page when only one key was declared, to a server to which the slot is being moved. ARGV: how many other
-- keys, which, and what the page is to be told. As the server takes no command with two keys there, one of which is
-- missing, EXISTS is asked key by key.
local KEYS, ARGV = {KEYS[1], unpack(ARGV, 2, ARGV[1] + 1)}, {unpack(ARGV, ARGV[1] + 2)}
local redis = setmetatable({
  call = function(command, ...)
    if command ~= 'EXISTS' then return redis.call(command, ...) end
    local count = 0
    for i = 1, select('#', ...) do count = count + redis.call(command, (select(i, ...))) end
    return count
  end,
}, {__index = redis})
