"""What is left out: real SGLang servers unless asked for, and patches of compiled code."""

import pytest

from router.release import COMPILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-sglang",
        action="store_true",
        help="also run the tests that install and start real SGLang servers",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = set[str]()
    if not config.getoption("--real-sglang"):
        marks.add("real_sglang")
    if COMPILED:
        marks.add("patches")
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
