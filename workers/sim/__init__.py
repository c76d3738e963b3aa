"""The parts of the simulated worker: SGLang's HTTP surface around `workers.engine` in real time.

`http_server` speaks HTTP/1.1, `routes` finds what serves a path, `asks` reads request bodies,
`answers`, `messages` and `responses` write SGLang's answers by API, `worker` joins them with the
engine and the clock, `reports` tells the load, `faults` says how it misbehaves. Nothing here sleeps
or spawns a task per request: one timer per worker follows the engine's steps.
"""
