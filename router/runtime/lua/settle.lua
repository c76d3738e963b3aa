-- Ends reservations: what was not used goes back into the bucket it came from, what was used beyond
-- it becomes a debt there, and permits are released. Only the first settlement of an id counts.
--
-- Numbers: how many; of each the charges, with the amounts that were used.

local GIVEN_UP_MS = 60000

local function give_back(rule, reserved, own, used)
  local back = reserved - used
  if rule.parent then
    change(rule.parent, level_settled(rule.parent, back))
    if back >= 0 then back = math.max(0, back - (reserved - own)) end
  end
  change(rule, level_settled(rule, back))
end

-- What was taken, for the first who asks.
local function ended(reservation)
  local record, there = load_reservation(reservation)
  if there then
    if record then redis.call('DEL', reservation) end
  else
    -- Its ask may still be under way, on a connection that was given up: that must take nothing.
    redis.call('SET', reservation, GIVEN_UP, 'PX', GIVEN_UP_MS)
  end
  return record and record.taken or {}
end

for _ = 1, take_number() do
  local reservation, used = take_reservation(), {}
  for _, charge in ipairs(take_charges()) do used[charge.rule.key] = charge end
  for _, taken in ipairs(ended(reservation)) do
    local key, reserved, own = taken[1], taken[2], taken[3]
    local charge = used[key]
    if charge and charge.rule.permits then
      charge.rule.held = charge.rule.held - redis.call('ZREM', key, reservation)
    elseif charge then
      give_back(charge.rule, reserved, own, charge.amount)
    end
  end
end

