-- A router stops.
-- KEYS: replicas, heard, state; ARGV: 1 name
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HGET', KEYS[3], 'leader') == ARGV[1] then
  redis.call('HDEL', KEYS[3], 'leader')
end
return 1
