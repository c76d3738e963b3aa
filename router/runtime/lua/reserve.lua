-- Takes all that each ask names, or nothing of it, and remembers what was taken until the lease ends.
--
-- Numbers: how many asks; of each its lease in seconds, whether it extends a reservation (it takes
-- what that lacks then, and lasts as long), whether it is for requests to come (it gets that only
-- out of plenty), how much of what others share it leaves when it exceeds a guarantee (a ratio; 0: it
-- does not), and its charges.
-- Answers doubles: of each ask 1 (granted), 2 (granted above a guarantee), 0 (denied) or -1 (its reservation is known, or was given
-- up before; or there is none to extend), and of each charge its wait in seconds and what is left: a
-- level, free permits.

local answer = {}

local function leaves_plenty(rule, amount)
  if rule.permits then return is_ample(rule, rule.burst - rule.held - amount) end
  if rule.parent then return share_is_ample(rule, amount) end
  return is_ample(rule, rule.level - amount)
end

local function look(charge, ahead, charges, borrows)
  local rule, amount = charge.rule, charge.amount
  if ahead and not leaves_plenty(rule, amount) then return INF, 0 end
  if rule.permits then
    if rule.held + amount <= rule.burst then return 0, amount end
    return INF, 0
  end
  if rule.parent then return share_taking(rule, amount) end
  if rule.above then return guarantee_taking(rule, amount, charges, borrows) end
  return wait_s(rule, amount, 0), amount
end

local function take(charge, reservation, ends_at)
  local rule = charge.rule
  if rule.permits then
    for i = charge.before + 1, charge.before + charge.amount do
      redis.call('ZADD', rule.key, string.format('%.17g', ends_at), permit(reservation, i))
    end
    rule.held = rule.held + charge.amount
  elseif rule.parent then
    change(rule.parent, rule.parent.level - charge.amount)
    change(rule, rule.level - charge.own)
  else
    change(rule, rule.level - charge.own)
    if rule.above and charge.own ~= charge.amount then
      change(rule.above, rule.above.level - (charge.amount - charge.own))
    end
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

local function reserve(reservation, lease_s, extends, ahead, borrows, charges)
  local known, there = load_reservation(reservation)
  local status, before, taken = 1, taken_by_key(known), {}
  for _, charge in ipairs(charges) do
    local had = before[charge.rule.key] or {nil, 0, 0}
    charge.before, charge.own_before = had[2], had[3]
    charge.amount = math.max(0, charge.amount - had[2])
  end
  for _, charge in ipairs(charges) do
    charge.wait_s, charge.own = look(charge, ahead, charges, borrows)
    if charge.wait_s > 0 then
      status = 0
      heal(charge.rule)
    end
  end
  if extends and not known or there and not extends then status = -1 end
  if status == 1 then
    if known then lease_s = known.ends_at - now end
    for i, charge in ipairs(charges) do
      take(charge, reservation, now + lease_s)
      if charge.rule.above and charge.own ~= charge.amount then status = 2 end
      local amount, own = charge.before + charge.amount, charge.own_before + charge.own
      taken[i] = {charge.rule.key, amount, own}
    end
    save_reservation(reservation, {taken = taken}, lease_s)
  end
  answer[#answer + 1] = status
  for _, charge in ipairs(charges) do
    answer[#answer + 1] = charge.wait_s
    answer[#answer + 1] = left(charge.rule)
  end
end

for _ = 1, take_number() do
  local reservation, lease_s = take_reservation(), take_number()
  local extends, ahead, borrows = take_number() == 1, take_number() == 1, take_number()
  reserve(reservation, lease_s, extends, ahead, borrows, take_charges())
end
save_rules(rules)
return struct.pack('<' .. string.rep('d', #answer), unpack(answer))
