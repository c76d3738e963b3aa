-- Lets reservations last on, those of requests that run long. Numbers as in reserve.lua; amounts do
-- not matter.

for _ = 1, take_number() do
  local reservation, lease_s = take_reservation(), take_number()
  local record = load_reservation(reservation)
  if record then save_reservation(reservation, record, lease_s) end
  for _ = 1, take_number() do
    local rule = rules[take_number()]
    take_number()
    if record and rule.permits then
      redis.call('ZADD', rule.key, 'XX', string.format('%.17g', now + lease_s), reservation)
    end
  end
end
