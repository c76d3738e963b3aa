"""What limits may be set to: each fault is named, and unset is not 0 (CF03)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import BadConfig, Config
from router.config_source import load_config
from router.tenant_settings import digest_of

LIMITS = [
    ("limits.tenant.requests_per_minute", float),
    ("limits.tenant.cost_per_s", float),
    ("limits.tenant.concurrency", int),
    ("limits.models.m.cost_per_s", float),
    ("limits.lanes.short.concurrency", int),
    ("limits.classes.p2.cost_per_s", float),
    ("limits.classes.p3.concurrency", int),
    ("limits.cluster.cost_per_s", float),
    ("tenants.acme.limits.requests_per_minute", float),
    ("tenants.acme.limits.cost_per_s", float),
    ("tenants.acme.limits.concurrency", int),
]


def document(path: str, value: Any) -> dict[str, Any]:
    """A configuration with one setting."""
    made: Any = value
    for name in reversed(path.split(".")):
        made = {name: made}
    whole: dict[str, Any] = made
    return whole


def loaded(folder: Path, path: str, value: Any) -> Config:
    written = folder / "laneway.yaml"
    written.write_text(yaml.safe_dump(document(path, value)))
    return load_config(written)


def setting(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(("path", "kind"), LIMITS)
@pytest.mark.parametrize("value", [0, -1, True, "ten", [], float("inf"), float("nan"), 1e300])
def test_what_is_no_limit_is_a_fault_with_its_path(
    path: str, kind: type, value: Any, tmp_path: Path
) -> None:
    del kind
    with pytest.raises(BadConfig) as caught:
        loaded(tmp_path, path, value)
    assert all(fault.startswith(f"{path}: ") for fault in caught.value.faults)


@pytest.mark.parametrize(("path", "kind"), LIMITS)
@pytest.mark.parametrize(("value", "meaning"), [(None, None), ("10", 10), (1e3, 1000)])
def test_what_is_a_limit_means_what_is_documented(
    path: str, kind: type, value: Any, meaning: Any, tmp_path: Path
) -> None:
    found = setting(loaded(tmp_path, path, value), path)
    assert found == meaning
    assert found is None or isinstance(found, kind)


@pytest.mark.parametrize(("path", "kind"), LIMITS)
def test_a_half_is_a_rate_and_no_number_of_requests(path: str, kind: type, tmp_path: Path) -> None:
    if kind is float:
        assert setting(loaded(tmp_path, path, 1.5), path) == 1.5
    else:
        with pytest.raises(BadConfig, match="must be a whole number"):
            loaded(tmp_path, path, 1.5)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("limits.tenant.cost_burst", 5, "limits.tenant: cost_burst needs cost_per_s"),
        ("limits.tenant.cost_ceiling_per_s", 5, "limits.tenant: cost_ceiling_per_s needs cost_per"),
        (
            "tenants.a.limits",
            {"cost_per_s": 5, "cost_ceiling_per_s": 5},
            "tenants.a.limits: cost_ceiling_per_s must be above cost_per_s",
        ),
        ("limits.borrow_below", 0, "limits.borrow_below: must be above 0"),
        ("limits.tenant.requests_burst", 5, "limits.tenant: requests_burst needs"),
        ("limits.cluster.shares.p0", 0.9, "limits.cluster.shares: the shares add up to 130%"),
        ("limits.cluster.shares.p0", 0, "limits.cluster.shares.p0: must be above 0"),
        ("limits.tenants", {}, "limits.tenants: there is no such setting"),
        ("limits.wait_s_max", -1, "limits.wait_s_max: must be 0.0 or more"),
        ("tenants.a b", {}, "tenants.a b"),
        ("tenants.-a", {}, "tenants.-a"),
        ("tenants.a.keys", ["lw-secret"], "tenants.a.keys.0: must be sha256: and 64"),
        ("tenants.a.keys", ["sha256:12"], "tenants.a.keys.0: must be sha256: and 64"),
        ("tenants.a.tier", "gold", "tenants.a.tier: must be 'premium', 'standard', 'free'"),
        ("tenants.a", {"priority": "P0", "tier": "free"}, "tenants.a: priority P0 is above P2"),
        ("tenants.a", {"priority": "P1", "ceiling": "P3"}, "tenants.a: priority P1 is above P3"),
        ("auth.trusted_proxies", ["10.0.0.0/33"], "auth.trusted_proxies.0"),
        ("auth.trusted_proxies", ["10.0.0.1/8"], "auth.trusted_proxies.0"),
        ("auth.tenant_header", "authorization", "auth.tenant_header: must be the name of a"),
        ("auth.tenant_header", "x user", "auth.tenant_header: must be the name of a header"),
        ("auth.tenant_header", "X-User-Tier", "auth: tenant_header and tier_header are the same"),
    ],
)
def test_other_faults_are_named(path: str, value: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as caught:
        loaded(tmp_path, path, value)
    assert any(each.startswith(fault) for each in caught.value.faults), caught.value.faults
    assert "lw-secret" not in str(caught.value)


def test_a_key_stands_for_one_tenant() -> None:
    key = digest_of("lw-1")
    with pytest.raises(BadConfig, match=r"tenants.b.keys: the key sha256:\w{8}... is in tenants.a"):
        load_config(overrides={"tenants": {"a": {"keys": [key]}, "b": {"keys": [key]}}})
    with pytest.raises(BadConfig, match=r"is in auth.admin_keys too"):
        load_config(overrides={"auth": {"admin_keys": ["lw-1"]}, "tenants": {"a": {"keys": [key]}}})


def test_a_model_is_limited_under_one_of_its_names() -> None:
    limits = {"models": {"big": {"concurrency": 1}, "gpt-4": {"concurrency": 2}}}
    with pytest.raises(BadConfig, match=r"limits\.models: big and gpt-4 are one model"):
        load_config(overrides={"limits": limits, "models": {"big": {"aliases": ["gpt-4"]}}})
