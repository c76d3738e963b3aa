"""Which class a request gets: what it claims, up to a ceiling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.core.claims import Grant, allowed, claim_of, granted
from router.core.types import Priority
from router.model_settings import ModelSettings
from router.qos_settings import ClassesSettings
from router.tenant_settings import TenantSettings, TierName

P0, P1, P2, P3 = Priority
NAMES = st.sampled_from(["P0", "P1", "P2", "P3"])


@pytest.mark.parametrize(
    ("text", "priority"),
    [
        ("P0", P0), ("p1", P1), (" P2 ", P2), ("p3", P3),
        ("premium", P0), ("Standard", P1), ("FREE", P2), ("offline", P3),
    ],
)  # fmt: skip
def test_a_class_has_two_names_in_any_case(text: str, priority: Priority) -> None:
    assert claim_of(text) is priority


@pytest.mark.parametrize("text", ["", "0", "P4", "p", "P0,P1", "high", "P0 P0", "P\xb2"])
def test_other_words_name_none(text: str) -> None:
    assert claim_of(text) is None


def test_without_a_claim_the_default_is_taken() -> None:
    assert granted(None, None, ClassesSettings()) == Grant(P1, clamped=False)
    assert granted(None, None, ClassesSettings(default="P3")) == Grant(P3, clamped=False)


@pytest.mark.parametrize(
    ("claim", "grant"), [(P0, (P1, True)), (P1, (P1, False)), (P3, (P3, False))]
)
def test_a_claim_above_the_ceiling_is_cut(claim: Priority, grant: tuple[Priority, bool]) -> None:
    assert granted(None, claim, ClassesSettings(ceiling="P1")) == grant


def test_a_tenant_has_a_ceiling_and_a_default_of_its_own() -> None:
    classes, tenant = ClassesSettings(ceiling="P1"), TenantSettings(ceiling="P0", priority="P2")
    assert granted(tenant, P0, classes) == (P0, False)
    assert granted(tenant, None, classes) == (P2, False)
    low = TenantSettings(ceiling="P2")
    assert granted(low, P0, classes) == (P2, True)
    assert granted(low, None, classes) == (P2, False)  # it claimed nothing that could be cut


@pytest.mark.parametrize(
    ("tenant", "tier", "claim", "grant"),
    [
        ({"tier": "free"}, None, None, (P2, False)),
        ({"tier": "free"}, None, P0, (P2, True)),
        ({"tier": "free"}, None, P3, (P3, False)),
        ({"tier": "premium"}, None, None, (P0, False)),
        ({"tier": "free", "ceiling": "P1"}, None, P0, (P1, True)),
        ({"tier": "premium", "priority": "P3"}, None, None, (P3, False)),
        ({}, "premium", None, (P0, False)),
        ({}, "free", P0, (P2, True)),
        ({"ceiling": "P1"}, "premium", None, (P1, False)),
        ({"tier": "premium"}, "free", None, (P2, False)),
        (None, "premium", None, (P0, False)),
        (None, "standard", P0, (P1, True)),
    ],
)
def test_a_tier_sets_class_and_ceiling(
    tenant: dict[str, str] | None,
    tier: TierName | None,
    claim: Priority | None,
    grant: tuple[Priority, bool],
) -> None:
    settings = None if tenant is None else TenantSettings.model_validate(tenant)
    assert granted(settings, claim, ClassesSettings(ceiling="P1"), tier) == grant


def test_a_tenant_may_ask_for_its_models_by_any_of_their_names() -> None:
    models = {"big": ModelSettings(aliases=("gpt-4", "large")), "small": ModelSettings()}
    assert allowed(TenantSettings(), models) is None
    assert allowed(TenantSettings(models=("gpt-4", "x:lora")), models) == {
        "big",
        "gpt-4",
        "large",
        "x:lora",
    }


def test_a_default_above_the_ceiling_is_a_fault() -> None:
    with pytest.raises(ValidationError, match="above the ceiling"):
        ClassesSettings(default="P0", ceiling="P1")


@given(claim=st.none() | st.sampled_from(Priority), ceiling=NAMES, own=st.none() | NAMES)
def test_nobody_gets_more_than_the_ceiling_or_less_than_asked(
    claim: Priority | None, ceiling: str, own: str | None
) -> None:
    classes = ClassesSettings.model_validate({"ceiling": ceiling, "default": "P3"})
    tenant = TenantSettings.model_validate({"ceiling": own})
    grant = granted(tenant, claim, classes)
    assert grant.priority >= Priority[own or ceiling]
    wanted = P3 if claim is None else claim
    assert grant.priority >= wanted
    assert grant.clamped == (claim is not None and grant.priority > claim)
