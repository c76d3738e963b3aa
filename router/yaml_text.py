"""YAML as people write settings: read within bounds, each key once, every fault with its place.

YAML can say more than settings need: aliases that unfold to billions of nodes, nesting without end,
keys that silently replace each other. What is read here has bounded size and depth, aliases counted
as what they stand for. Layer 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

CHARS_MAX: Final = 4 * 2**20
DEPTH_MAX: Final = 32
# With aliases unfolded; ten thousand workers with all their fields stay below.
NODES_MAX: Final = 500_000


class BadYaml(ValueError):
    """Text that is not YAML, or not within the bounds. `faults` holds one line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class _Loader(yaml.SafeLoader):
    """Builds the tree of nodes, but no deeper than DEPTH_MAX."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Build one node and those below it."""
        if self._depth > DEPTH_MAX:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise BadYaml([f"line {line}: nested deeper than {DEPTH_MAX} levels"])
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def read_yaml(text: str) -> Any:
    """Return what `text` says; None when it says nothing. Raises BadYaml with every fault."""
    if len(text) > CHARS_MAX:
        raise BadYaml([f"longer than {CHARS_MAX} characters"])
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_size(node)
            if faults := list(_repeated(node, "")):
                raise BadYaml(faults)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as exc:
        raise BadYaml([f"not YAML: {' '.join(str(exc).split())}"]) from exc
    except (ValueError, OverflowError) as exc:
        # A date that no calendar has, a number that no float holds.
        raise exc if isinstance(exc, BadYaml) else BadYaml([f"not YAML: {exc}"]) from exc


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_size(root: yaml.Node) -> None:
    """Raise BadYaml for too many nodes or levels, aliases unfolded, or one that holds itself."""
    sizes: dict[int, int] = {}
    heights: dict[int, int] = {}
    open_nodes: set[int] = set()

    def measure(node: yaml.Node) -> None:
        key, line = id(node), node.start_mark.line + 1
        if key in open_nodes:
            raise BadYaml([f"line {line}: an alias holds itself"])
        if key in sizes:
            return
        open_nodes.add(key)
        below = _children(node)
        for child in below:
            measure(child)
        open_nodes.discard(key)
        sizes[key] = 1 + sum(sizes[id(child)] for child in below)
        heights[key] = 1 + max((heights[id(child)] for child in below), default=0)
        if sizes[key] > NODES_MAX:
            raise BadYaml([f"line {line}: aliases unfold to more than {NODES_MAX} values"])
        if heights[key] > DEPTH_MAX + 1:
            raise BadYaml([f"line {line}: nested deeper than {DEPTH_MAX} levels"])

    measure(root)


def _repeated(node: yaml.Node, path: str) -> Iterator[str]:
    """One line for each key that stands twice in one mapping."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[Any, int] = {}
        for key, value in node.value:
            name = str(key.value)
            where = f"{path}.{name}" if path else name
            line = key.start_mark.line + 1
            identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if identity in lines:
                yield f"{where}: given twice, in lines {lines[identity]} and {line}"
            lines.setdefault(identity, line)
            yield from _repeated(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, f"{path}.{index}" if path else str(index))
