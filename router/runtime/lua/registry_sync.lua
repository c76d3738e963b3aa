-- One exchange of a router with the others: says what it is, hears what the others are.
-- KEYS: workers, leases, removed, replicas, heard, state
-- ARGV: 1 name, 2 ttl_ms, 3 what the router says of itself, 4 what nobody has said before: an epoch
--       for a registry without one, and a token of what changes here,
--       5 the epoch and 6 the version that it knows, 7 "1" if it may lead, 8 its term,
--       9 shares of the classes, then pairs of worker and ttl_ms whose leases it renews.
-- Returns epoch, version, now_ms, leader, term, shares, replicas; and workers and removals, unless
-- the router knows this version.
local workers, leases, removed, replicas, heard, state = unpack(KEYS)
local name = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

redis.call('HSETNX', state, 'epoch', ARGV[4])
redis.call('HSETNX', state, 'version', 0)
redis.call('HSET', replicas, name, ARGV[3])
redis.call('ZADD', heard, now + ARGV[2], name)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', heard, '-inf', now)) do
  redis.call('HDEL', replicas, gone)
  redis.call('ZREM', heard, gone)
end

-- Leases are renewed before any is taken for over: after a pause of all routers they all look old.
for i = 10, #ARGV, 2 do
  if redis.call('HEXISTS', workers, ARGV[i]) == 1 then
    redis.call('ZADD', leases, 'GT', now + ARGV[i + 1], ARGV[i])
  end
end
for _, over in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
  redis.call('ZREM', leases, over)
  if redis.call('HDEL', workers, over) == 1 then
    redis.call('HINCRBY', state, 'version', 1)
    redis.call('HSET', state, 'token', ARGV[4])
  end
end

-- The leader leads for as long as it is heard of. A new one gets a new term, and what is said in
-- an old term counts no more.
local leader = redis.call('HGET', state, 'leader')
if leader and not redis.call('ZSCORE', heard, leader) then
  leader = false
end
if leader == name and ARGV[7] ~= '1' then
  leader = false
  redis.call('HDEL', state, 'leader')
end
if not leader and ARGV[7] == '1' then
  leader = name
  redis.call('HSET', state, 'leader', name)
  redis.call('HINCRBY', state, 'term', 1)
end
local term = redis.call('HGET', state, 'term') or '0'
if leader == name and ARGV[8] == term and ARGV[9] ~= '' then
  redis.call('HSET', state, 'shares', ARGV[9])
end

local epoch = redis.call('HGET', state, 'epoch')
-- After a failover the count may be the same again, of other changes; the token is not.
local token = redis.call('HGET', state, 'token') or ''
local version = redis.call('HGET', state, 'version') .. ':' .. token
local answer = {
  epoch, version, tostring(now), leader or '', term, redis.call('HGET', state, 'shares') or '',
  redis.call('HGETALL', replicas),
}
if epoch ~= ARGV[5] or version ~= ARGV[6] then
  answer[8] = redis.call('HGETALL', workers)
  answer[9] = redis.call('HVALS', removed)
end
return answer
