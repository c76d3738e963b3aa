-- Lets reservations last on, those of requests that run long. Numbers as in reserve.lua, of which
-- only the lease matters and which permits there are.

for _ = 1, take_number() do
  local reservation, lease_s = take_reservation(), take_number()
  take_number()
  take_number()
  take_number()
  local record = load_reservation(reservation)
  if record then save_reservation(reservation, record, lease_s) end
  local taken = taken_by_key(record)
  for _, charge in ipairs(take_charges()) do
    local key = charge.rule.key
    for i = 1, charge.rule.permits and taken[key] and taken[key][2] or 0 do
      redis.call('ZADD', key, 'XX', string.format('%.17g', now + lease_s), permit(reservation, i))
    end
  end
end
