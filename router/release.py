"""Which release this is, and whether its hot path was compiled (docs/design.md, "Compiled")."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from router.core import timers

VERSION: Final = version("laneway")
COMPILED: Final = not str(timers.__file__).endswith(".py")
BUILD: Final = "compiled" if COMPILED else "interpreted"
