"""One router process per module, with the settings of the module's CONFIG; workers per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.field.harness import Field, RouterProcess, router_process


@pytest.fixture(scope="module")
def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterProcess]:
    config = getattr(request.module, "CONFIG", {})
    with router_process(tmp_path_factory.mktemp("router"), config) as router:
        yield router


@pytest.fixture
async def field(request: pytest.FixtureRequest, router: RouterProcess) -> AsyncIterator[Field]:
    auth = getattr(request.module, "CONFIG", {}).get("auth", {})
    field = Field(
        router,
        key=next(iter(auth.get("api_keys", [])), ""),
        admin_key=next(iter(auth.get("admin_keys", [])), ""),
    )
    yield field
    await field.assert_clean()
