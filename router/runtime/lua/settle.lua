-- Ends reservations: what was not used goes back into the bucket it came from, what was used beyond
-- it becomes a debt there, and permits are released. Only the first settlement of an id counts. One
-- that does not end its reservation leaves it with what was used, of permits too.
--
-- Numbers: how many; of each whether it ends it, and the charges, with the amounts that were used.

local GIVEN_UP_MS = 60000

local function release(rule, reservation, first, last)
  for i = first, last do
    rule.held = rule.held - redis.call('ZREM', rule.key, permit(reservation, i))
  end
end

-- `taken` is then what was used.
local function give_back(rule, taken, used)
  local reserved, own = taken[2], taken[3]
  local back, kept = reserved - used, nil
  if rule.parent then
    change(rule.parent, level_settled(rule.parent, back))
    if back >= 0 then back = math.max(0, back - (reserved - own)) end
    kept = own - back
  else
    kept = math.min(own, used)
    if own == reserved then kept = used end
    local borrowed_back = (reserved - own) - (used - kept)
    if rule.above and borrowed_back ~= 0 then
      change(rule.above, level_settled(rule.above, borrowed_back))
    end
    back = own - kept
  end
  change(rule, level_settled(rule, back))
  taken[2], taken[3] = used, kept
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
  return record
end

local function settle(reservation, ends, charges)
  local record
  if ends then record = ended(reservation) else record = load_reservation(reservation) end
  local taken = taken_by_key(record)
  for _, charge in ipairs(charges) do
    local rule, used = charge.rule, charge.amount
    local what = taken[rule.key]
    if what and rule.permits then
      release(rule, reservation, ends and 1 or used + 1, what[2])
      what[2] = math.min(what[2], used)
    elseif what and what[2] ~= used then
      give_back(rule, what, used)
    end
  end
  if record and not ends then save_reservation(reservation, record, record.ends_at - now) end
end

for _ = 1, take_number() do
  settle(take_reservation(), take_number() == 1, take_charges())
end

