-- Take a worker out for all routers; each lets its own requests there end.
-- KEYS: workers, leases, removed, state
-- ARGV: 1 id, 2 url, 3 drain_ms, 4 "1" if its agent must not bring it back, 5 remembered_ms,
--       6 most removals, 7 "ago" and 8 for how many ms, or "lost" and 8 at what time it was, for one
--       that the registry has lost, 9 a token of this change
-- Returns the removal.
local workers, leases, removed, state = unpack(KEYS)
local id, url, drain, barred, remembered = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Under the same id there may be another worker by now, at another URL.
local entry = redis.call('HGET', workers, id)
local is_there = entry and cjson.decode(entry).spec.url == url
local is_lost = ARGV[7] == 'lost'
local at = is_lost and tonumber(ARGV[8]) or now - ARGV[8]
local removal = cjson.encode({
  id = id, url = url, barred = barred == '1', at_ms = at, drain_until_ms = at + drain,
  until_ms = at + drain + remembered,
})
if is_lost then
  -- It takes nothing out again: what is there came after it.
  if is_there or at + drain + remembered <= now or redis.call('HEXISTS', removed, url) == 1 then
    return removal
  end
elseif is_there then
  redis.call('HDEL', workers, id)
  redis.call('ZREM', leases, id)
end
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
redis.call('HSET', removed, url, removal)
redis.call('HINCRBY', state, 'version', 1)
redis.call('HSET', state, 'token', ARGV[9])
return removal
