"""Field cases: reports of what went wrong in other routers, as black-box tests of this one.

The router runs as its own process; the workers are scripted and live in the test's event loop.
Every test ends with the router clean: it serves a plain chat, its gauges are at 0, it is the same
process and has logged no trace. The id of the case stands in each test's docstring.
"""
