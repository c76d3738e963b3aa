"""The one option of the test suite: tests against real SGLang servers run only when asked for."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-sglang",
        action="store_true",
        help="also run the tests that install and start real SGLang servers",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--real-sglang"):
        return
    left_out = [item for item in items if item.get_closest_marker("real_sglang")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
