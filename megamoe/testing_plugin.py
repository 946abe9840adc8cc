"""A pytest plugin for other projects: failures of ``assert_bitwise`` leave a page and two bundles.

    pytest -p megamoe.testing_plugin --megamoe-artifacts DIR

The failing test's section "megamoe" names the page and the command that explains the bundles again.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from megamoe.testing import BitwiseError


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megamoe")
    group.addoption(
        "--megamoe-artifacts", metavar="DIR", help="where failures of assert_bitwise leave pages and bundles"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--megamoe-artifacts")
    if folder:
        os.environ["MEGAMOE_ARTIFACTS"] = os.path.abspath(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, BitwiseError) and isinstance(error.page, Path):
        bundles = " ".join(
            str(error.page.with_suffix(f".{side}.safetensors")) for side in ("expected", "actual")
        )
        report.sections.append(("megamoe", f"page: {error.page}\nmegamoe explain {bundles}"))
    return report
