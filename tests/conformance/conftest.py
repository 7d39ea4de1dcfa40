"""Rows of the specifications and the tests that show them: `make conformance`."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption(
        "--conformance-list", action="store_true", help="print each row with its tests, run none"
    )


def pytest_runtestloop(session):
    if not session.config.getoption("--conformance-list", default=False):
        return None
    from conformance import listing

    print("\n" + listing(session.items))
    return True
