"""Rows of the specifications and the tests that show them: `pytest tests/conformance --conformance-list`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scheduling"))  # the fake runner and its scene


def pytest_addoption(parser):
    parser.addoption(
        "--conformance-list", action="store_true", help="print each row with its tests, run none"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "row(name): the row of a specification that the test shows")


def pytest_runtestloop(session):
    if not session.config.getoption("--conformance-list", default=False):
        return None
    from conformance import listing

    print("\n" + listing(session.items))
    return True
