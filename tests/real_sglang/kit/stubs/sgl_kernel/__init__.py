"""Stand-in for the CUDA-only kernel package: every name is a function that refuses to run."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        message = f"sgl_kernel.{name} has no CPU version"
        raise NotImplementedError(message)

    return refuse
