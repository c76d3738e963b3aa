-- Lets reservations last on, those of requests that run long. One that a process before this one was
-- granted may be unknown, as it came from a lease: it is taken for granted, and only its permits are
-- taken, however many there are left. What else it took stays charged with that lease, which ends.
--
-- Numbers: how many; of each its lease in seconds, whether it is to be taken for granted, and its
-- charges.

local function taken_for_granted(charges)
  local taken = {}
  for i, charge in ipairs(charges) do
    taken[i] = {charge.rule.key, charge.amount, charge.amount}
  end
  return {taken = taken}
end

for _ = 1, take_number() do
  local reservation, lease_s, adopted = take_reservation(), take_number(), take_number() == 1
  local charges = take_charges()
  local record, there = load_reservation(reservation)
  if not record and adopted and there ~= GIVEN_UP then record = taken_for_granted(charges) end
  if record then save_reservation(reservation, record, lease_s) end
  local taken, ends_at = taken_by_key(record), string.format('%.17g', now + lease_s)
  for _, charge in ipairs(charges) do
    local rule = charge.rule
    for i = 1, rule.permits and taken[rule.key] and taken[rule.key][2] or 0 do
      if adopted then
        rule.held = rule.held + redis.call('ZADD', rule.key, ends_at, permit(reservation, i))
      else
        redis.call('ZADD', rule.key, 'XX', ends_at, permit(reservation, i))
      end
    end
  end
end
