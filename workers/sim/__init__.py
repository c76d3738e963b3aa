"""The parts of the simulated worker: SGLang's HTTP surface around `workers.engine` in real time.

`http_server` speaks HTTP/1.1, `asks` reads request bodies, `answers` writes SGLang's answers,
`worker` joins them with the engine and the clock, `reports` tells the load, `ops` serves the other
routes, `faults` says how it misbehaves. Nothing here sleeps or spawns a task per request: one
timer per worker follows the engine's steps.
"""
