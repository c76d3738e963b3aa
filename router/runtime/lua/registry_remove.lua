-- Take a worker out for all routers; each lets its own requests there end.
-- KEYS: workers, leases, removed, state
-- ARGV: 1 id, 2 url, 3 drain_ms, 4 "1" if its agent must not bring it back, 5 remembered_ms,
--       6 most removals
-- Returns the removal.
local workers, leases, removed, state = unpack(KEYS)
local id, url, drain, barred, remembered = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

redis.call('HDEL', workers, id)
redis.call('ZREM', leases, id)
local oldest, oldest_at
local there = redis.call('HGETALL', removed)
for i = 1, #there, 2 do
  local one = cjson.decode(there[i + 1])
  if one.until_ms <= now then
    redis.call('HDEL', removed, there[i])
  elseif not oldest_at or one.at_ms < oldest_at then
    oldest, oldest_at = there[i], one.at_ms
  end
end
if redis.call('HLEN', removed) >= tonumber(ARGV[6]) and oldest then
  redis.call('HDEL', removed, oldest)
end
local removal = cjson.encode({
  id = id, url = url, barred = barred == '1', at_ms = now, drain_until_ms = now + drain,
  until_ms = now + drain + remembered,
})
redis.call('HSET', removed, url, removal)
redis.call('HINCRBY', state, 'version', 1)
return removal
