-- Lets reservations last on, those of requests that run long. Numbers as in reserve.lua; amounts do
-- not matter.

for _ = 1, take_number() do
  local reservation, lease_s = take_reservation(), take_number()
  local record = load_reservation(reservation)
  if record then save_reservation(reservation, record, lease_s) end
  for _, charge in ipairs(take_charges()) do
    if record and charge.rule.permits then
      redis.call('ZADD', charge.rule.key, 'XX', string.format('%.17g', now + lease_s), reservation)
    end
  end
end
