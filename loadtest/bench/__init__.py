"""What a router costs: CPU, memory and time per request and per chunk, beside other routers.

A round starts two fake workers and one router, loads it, and reads the CPU of the router's
whole process tree from /proc. Rounds go through all routers in turn, since on a shared machine
only the ratios of one run are worth keeping. Linux only. `scripts/bench` is the way in.

A round: `json` sends plain completions flat out; `burst` streams that the worker writes at
once; `paced` streams of one chunk per decode step, as SGLang writes them; `latency` one request
at a time, direct and routed by turns; `chunk_latency` the same for the way of each chunk; then
memory and idle CPU; `big` plain completions with long prompts. Every byte of every answer is
compared with what the worker sent.
"""
