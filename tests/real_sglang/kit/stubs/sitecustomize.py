"""Declare two torchvision operators before torchvision is imported beside a CPU build of torch.

The interpreter imports this module by itself at start, because its folder is on PYTHONPATH.
torchvision registers Python code for operators that its CUDA-built C++ part would declare;
beside a CPU build of torch that part does not load, and the import fails.
"""

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        # torch drops an operator when the library that declared it is collected.
        self._libraries: list[object] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name != "torchvision" or self._libraries:
            return
        torch = importlib.import_module("torch")
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        self._libraries.append(library)


sys.meta_path.insert(0, _DeclareTorchvisionOps())
