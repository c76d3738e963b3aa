"""The composition root: the only place that constructs and wires the router's objects.

    Config -> Dispatcher -> Driver (with Upstreams, Prober) -> surface (ASGI) -> Server, whose
    HTTP protocol takes the inference POSTs for itself

`build` makes an `App`, `run` serves one until a signal ends it.
"""

from router.app.build import App, build, run
from router.app.preflight import faults, warnings
from router.app.process import CannotServe

__all__ = ["App", "CannotServe", "build", "faults", "run", "warnings"]
