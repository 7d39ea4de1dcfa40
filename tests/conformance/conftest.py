"""Rows of the specifications and the tests that show them: `pytest tests/conformance --conformance-list`."""

from __future__ import annotations


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
