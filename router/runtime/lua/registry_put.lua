-- Register a worker, change it, or give the registry back what it has lost.
-- KEYS: workers, leases, removed, state
-- ARGV: 1 "new", "change" or "restore", 2 id, 3 url, 4 entry, 5 ttl_ms or "" (agents have one),
--       6 most workers, 7 a token of this change
-- Returns "ok", "exists" with the id of the worker that is there, "removed", "gone", or "full".
local workers, leases, removed, state = unpack(KEYS)
local how, id, url, entry, ttl = unpack(ARGV)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Said again, as the first answer was lost: the same registration, perhaps changed since.
local before = redis.call('HGET', workers, id)
if how == 'new' and before and cjson.decode(before).stamp == cjson.decode(entry).stamp then
  how = 'change'
end
if how == 'change' then
  if not before then
    return {'gone'}
  end
else
  if before then
    return {'exists', id}
  end
  if redis.call('HLEN', workers) >= tonumber(ARGV[6]) then
    return {'full'}
  end
  local there = redis.call('HGETALL', workers)
  for i = 2, #there, 2 do
    if cjson.decode(there[i]).spec.url == url then
      return {'exists', there[i - 1]}
    end
  end
  local removal = redis.call('HGET', removed, url)
  if removal then
    removal = cjson.decode(removal)
    if how == 'restore' or (ttl ~= '' and removal.barred and removal.until_ms > now) then
      return {'removed'}
    end
    redis.call('HDEL', removed, url)
  end
end
redis.call('HSET', workers, id, entry)
if ttl ~= '' then
  redis.call('ZADD', leases, now + ttl, id)
elseif how ~= 'restore' then
  redis.call('ZREM', leases, id)
end
redis.call('HINCRBY', state, 'version', 1)
redis.call('HSET', state, 'token', ARGV[7])
return {'ok'}
