"""`laneway demo`: one router and six simulated workers in two lanes, under a mixed load.

Everything is a process of its own on this machine and speaks real HTTP. The demo registers the
workers, sends the load through the public URL and shows what happens, until `seconds` have passed
or somebody presses Ctrl-C. Then it stops every process and says what it saw.
"""

from router.demo.run import demo

__all__ = ["demo"]
