-- The arithmetic of router/core/bucket.py and ledger.py inside Redis, operation by operation; a test
-- holds the two together. This, settle.lua, renew.lua and reserve.lua are one script, in this order.
--
-- One call ends reservations, renews others and decides asks, many of each. All buckets that it
-- names are read at once, changed in memory, and each one that changed is written once, always with
-- a time to live: after it the bucket would be full, which is what one that is not there is.
-- Whatever else is found under a bucket's key counts as not there, so nothing can block for ever.
--
-- KEYS[1] is when the store began; then come the rules' keys, then the reservations', each in the
-- order of ARGV[1]. That holds all numbers as little-endian doubles (redis_scripts.py writes them):
-- how many rules and the rules, how many sets of rules and the sets, and what the other parts say.

local SLACK = 1e-9
local AMPLE_RATIO = 0.5
local MARGIN_S = 60
local TTL_MAX_S = 30 * 24 * 3600
local LEASE_MAX_S = 24 * 3600
local INF = math.huge
local GIVEN_UP = 'given up'

-- The server's clock: those of the routers are never compared.
local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end

local now = clock()
local numbers, at = ARGV[1], 1

local function take_number()
  local value
  value, at = struct.unpack('<d', numbers, at)
  return value
end

local reservations_at

-- The keys of reservations come last, in their order.
local function take_reservation()
  reservations_at = reservations_at + 1
  return KEYS[reservations_at]
end

local function set_with_ttl(key, value, ttl_s)
  ttl_s = math.max(MARGIN_S, math.min(ttl_s + MARGIN_S, TTL_MAX_S))
  redis.call('SET', key, value, 'PX', string.format('%.0f', ttl_s * 1000))
end

local function store_age_s()
  local born = tonumber(redis.call('GET', KEYS[1]))
  if not born or redis.call('PTTL', KEYS[1]) < TTL_MAX_S * 500 then
    born = born or now
    set_with_ttl(KEYS[1], string.format('%.17g', born), TTL_MAX_S)
  end
  return now - born
end

local function refilled(level, elapsed_s, rule)
  return math.min(rule.burst, level + math.max(0, elapsed_s) * rule.rate)
end

local function first_level(rule, age_s)
  if age_s >= rule.warm_up_s then return rule.burst end
  return rule.burst * math.max(0, age_s) / rule.warm_up_s
end

local function needed(rule, amount, spare)
  if amount > rule.amount_max then return INF end
  return math.min(amount + spare, rule.burst) * (1 - SLACK)
end

local function wait_s(rule, amount, spare)
  local missing = needed(rule, amount, spare) - rule.level
  if missing <= 0 then return 0 end
  if rule.rate > 0 then return missing / rule.rate end
  return INF
end

local function is_ample(rule, left)
  return left >= AMPLE_RATIO * rule.burst
end

local function level_settled(rule, surplus)
  if surplus >= 0 then return math.min(rule.burst, rule.level + surplus) end
  return math.max(rule.level + surplus, math.min(rule.level, -rule.debt_max))
end

-- When the other members of a family begin and end to hold back refill.
local function slopes(rule)
  local changes = {}
  for _, other in ipairs(rule.parent.members) do
    if other ~= rule and other.level < other.burst then
      changes[#changes + 1] = {math.max(0, -other.level / other.rate), -other.rate}
      changes[#changes + 1] = {(other.burst - other.level) / other.rate, other.rate}
    end
  end
  table.sort(changes, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  return changes
end

local function surplus_wait_s(rule, amount, spare)
  local parent, bursts, held = rule.parent, 0, 0
  if amount > parent.amount_max then return INF end
  for _, other in ipairs(parent.members) do
    if other ~= rule then
      bursts = bursts + other.burst
      held = held + math.max(0, other.level)
    end
  end
  local missing = math.min(amount + spare, parent.burst - bursts) * (1 - SLACK) - parent.level + held
  if missing <= 0 then return 0 end
  if parent.rate == 0 then return INF end
  local slope, waited = parent.rate, 0
  for _, change in ipairs(slopes(rule)) do
    if slope * (change[1] - waited) >= missing then break end
    missing = missing - slope * (change[1] - waited)
    slope, waited = slope + change[2], change[1]
  end
  if slope > 0 then return waited + missing / slope end
  return INF
end

local function is_within(rule, amount)
  return amount <= rule.burst and rule.level >= needed(rule, amount, 0)
end

local function beyond(rule, amount, lent_in_s, own)
  if lent_in_s == 0 then return 0, own end
  local own_in_s = wait_s(rule, amount, 0)
  if own_in_s == 0 then return 0, amount end
  return math.min(lent_in_s, own_in_s), 0
end

-- Seconds to wait, and the part of `amount` that comes from the member's own level.
local function share_taking(rule, amount)
  if is_within(rule, amount) then return 0, amount end
  local own = math.min(math.max(0, rule.level), amount)
  return beyond(rule, amount, surplus_wait_s(rule, amount, 0), own)
end

-- Seconds until `ratio` of a bucket that is shared is left without `amount`, or it is full.
local function room_wait_s(rule, amount, ratio)
  local in_s = 0
  if rule.parent then
    in_s = surplus_wait_s(rule, amount, ratio * rule.burst)
    rule = rule.parent
  end
  return math.max(in_s, wait_s(rule, amount, ratio * rule.burst))
end

-- The same of all that `charges` share with others.
local function room_in_s(charges, ratio)
  local longest = 0
  for _, charge in ipairs(charges) do
    if charge.rule.lends then
      longest = math.max(longest, room_wait_s(charge.rule, charge.amount, ratio))
    end
  end
  return longest
end

-- As share_taking. The guarantee may be exceeded where the ratio `borrows` is left of what
-- `charges` share with others; 0: nowhere.
local function guarantee_taking(rule, amount, charges, borrows)
  if is_within(rule, amount) then return 0, amount end
  if amount > rule.amount_max then return INF, 0 end
  local lent_in_s = INF
  if borrows > 0 then
    lent_in_s = math.max(room_in_s(charges, borrows), wait_s(rule.above, amount, 0))
  end
  return beyond(rule, amount, lent_in_s, 0)
end

local function share_is_ample(rule, amount)
  local left, held = rule.parent.level - amount, 0
  for _, other in ipairs(rule.parent.members) do
    if other ~= rule then held = held + math.max(0, other.level) end
  end
  return is_ample(rule.parent, left) and is_ample(rule, left - held)
end

-- Rules are numbered in the order of their keys, which follow KEYS[1]. A member comes after its
-- parent, and a guarantee after the bucket above it, and says by how many places; 0 is neither.
local function read_rule(number)
  local kind = take_number()
  return {
    key = KEYS[number + 1],
    permits = kind == 1,
    lends = kind == 2,
    guarantee = kind == 3,
    rate = take_number(),
    burst = take_number(),
    debt_max = take_number(),
    warm_up_s = take_number(),
    amount_max = take_number(),
    parent = number - take_number(),
    members = {},
  }
end

-- The level and moment that a key holds; nil for what was never written here.
local function parsed(text)
  local level, moment = string.match(text or '', '^(%S+) (%S+)$')
  level, moment = tonumber(level), tonumber(moment)
  if level and moment and level == level and math.abs(level) < INF and moment < INF then
    return level, moment
  end
end

-- Brings every bucket up to date. The moment of the last writer may lie ahead, when another server
-- took over or its clock was set back: then nothing is refilled, and the clock that is now counts.
local function load_buckets(rules)
  local age_s, keys = store_age_s(), {}
  if #rules == 0 then return end
  for i, rule in ipairs(rules) do keys[i] = rule.key end
  local texts = redis.call('MGET', unpack(keys))
  for i, rule in ipairs(rules) do
    local level, moment = parsed(texts[i])
    if level then
      -- Deeper than this nothing lawful gets, and it would take for ever to fill.
      level = math.max(level, -rule.debt_max - rule.amount_max)
      rule.level = refilled(level, now - moment, rule)
    else
      rule.level = first_level(rule, age_s)
    end
  end
end

local function load_permits(rule)
  if redis.call('TYPE', rule.key).ok ~= 'zset' then redis.call('DEL', rule.key) end
  redis.call('ZREMRANGEBYSCORE', rule.key, '-inf', string.format('%.17g', now))
  redis.call('ZREMRANGEBYSCORE', rule.key, string.format('(%.17g', now + LEASE_MAX_S), '+inf')
  rule.held = redis.call('ZCARD', rule.key)
end

-- All rules of this call, with their buckets as of now.
local function load_rules()
  local rules, buckets = {}, {}
  for i = 1, take_number() do rules[i] = read_rule(i) end
  for i, rule in ipairs(rules) do
    rule.parent = rule.parent < i and rules[rule.parent]
    if rule.guarantee then rule.above, rule.parent = rule.parent, false end
    if rule.parent then table.insert(rule.parent.members, rule) end
    if rule.permits then load_permits(rule) else table.insert(buckets, rule) end
  end
  load_buckets(buckets)
  reservations_at = #rules + 1
  return rules
end

local function save_permits(rule)
  local last = redis.call('ZRANGE', rule.key, -1, -1, 'WITHSCORES')
  if last[2] then
    local left_s = math.max(1, tonumber(last[2]) - now)
    redis.call('PEXPIRE', rule.key, string.format('%.0f', left_s * 1000))
  end
end

local function save_bucket(rule)
  local ttl_s = TTL_MAX_S
  if rule.rate > 0 then ttl_s = math.max((rule.burst - rule.level) / rule.rate, rule.warm_up_s) end
  set_with_ttl(rule.key, string.format('%.17g %.17g', rule.level, now), ttl_s)
end

local function save_rules(rules)
  for _, rule in ipairs(rules) do
    if rule.permits then save_permits(rule) elseif rule.changed then save_bucket(rule) end
  end
end

local function change(rule, level)
  rule.level = level
  rule.changed = true
end

-- A reservation holds when its lease ends, and of each charge its key, its amount and the part that
-- came from the level of the rule itself: what was not lent, not borrowed.
local function save_reservation(key, record, lease_s)
  record.ends_at = now + lease_s
  local left_ms = math.max(1, lease_s * 1000)
  redis.call('SET', key, cmsgpack.pack(record), 'PX', string.format('%.0f', left_ms))
end

-- What is under a reservation's key, nil when it is over, and whether anything is there.
local function load_reservation(key)
  local text = redis.call('GET', key)
  if not text or text == GIVEN_UP then return nil, text end
  local record = cmsgpack.unpack(text)
  if record.ends_at <= now then return nil, text end
  return record, text
end

-- What a reservation holds of each bucket, by key.
local function taken_by_key(record)
  local taken = {}
  for _, one in ipairs(record and record.taken or {}) do taken[one[1]] = one end
  return taken
end

-- Of the permits that one reservation holds, the name of each.
local function permit(reservation, number)
  if number == 1 then return reservation end
  return reservation .. '#' .. string.format('%.0f', number)
end

local rules = load_rules()

-- Sets of rules by which requests are charged: numbers of rules.
local sets = {}
for i = 1, take_number() do
  sets[i] = {}
  for j = 1, take_number() do sets[i][j] = rules[take_number()] end
end

-- What a request is charged: the number of its set, and an amount for each rule in it.
local function take_charges()
  local charges = {}
  for i, rule in ipairs(sets[take_number()]) do
    charges[i] = {rule = rule, amount = take_number()}
  end
  return charges
end
