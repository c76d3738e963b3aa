-- Takes all that each ask names, or nothing of it, and remembers what was taken until the lease ends.
--
-- Numbers: how many asks; of each its lease in seconds and its charges.
-- Answers doubles: of each ask 1 (granted), 0 (denied) or -1 (its reservation is known, or was
-- given up before), and of each charge its wait in seconds and what is left: a level, free permits.

local answer = {}

local function look(charge)
  local rule, amount = charge.rule, charge.amount
  if rule.permits then
    if rule.held + amount <= rule.burst then return 0, amount end
    return INF, 0
  end
  if rule.parent then return share_taking(rule, amount) end
  return wait_s(rule, amount), amount
end

local function take(charge, reservation, ends_at)
  local rule = charge.rule
  if rule.permits then
    redis.call('ZADD', rule.key, string.format('%.17g', ends_at), reservation)
    rule.held = rule.held + 1
  elseif rule.parent then
    change(rule.parent, rule.parent.level - charge.amount)
    change(rule, rule.level - charge.own)
  else
    change(rule, rule.level - charge.amount)
  end
end

local function left(rule)
  if rule.permits then return math.max(0, rule.burst - rule.held) end
  return rule.level
end

-- A bucket that denies is written by nobody, so one that has no time to live gets it here.
local function heal(rule)
  if not rule.permits and redis.call('PTTL', rule.key) == -1 then change(rule, rule.level) end
end

local function reserve(reservation, lease_s, charges)
  local status, record = 1, {}
  for _, charge in ipairs(charges) do
    charge.wait_s, charge.own = look(charge)
    if charge.wait_s > 0 then
      status = 0
      heal(charge.rule)
    end
  end
  if status == 1 and redis.call('EXISTS', reservation) == 1 then status = -1 end
  if status == 1 then
    for i, charge in ipairs(charges) do
      take(charge, reservation, now + lease_s)
      record[i] = {charge.rule.key, charge.amount, charge.own}
    end
    save_reservation(reservation, {taken = record}, lease_s)
  end
  answer[#answer + 1] = status
  for _, charge in ipairs(charges) do
    answer[#answer + 1] = charge.wait_s
    answer[#answer + 1] = left(charge.rule)
  end
end

for _ = 1, take_number() do
  reserve(take_reservation(), take_number(), take_charges())
end
save_rules(rules)
return struct.pack('<' .. string.rep('d', #answer), unpack(answer))
