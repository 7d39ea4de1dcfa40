"""What Ctrl-C must not interrupt, and what it must."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from quire.front.interrupt import deferred_interrupt, interruptible


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    """Each test begins with Python's own handler, and leaves the one that it has found."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_first_signal_comes_at_the_end_of_the_outermost_block(depth: int) -> None:
    reached: list[int] = []

    def nested(level: int) -> None:
        with deferred_interrupt():
            if level < depth:
                nested(level + 1)
            else:
                interrupt()
            reached.append(level)

    with pytest.raises(KeyboardInterrupt):
        nested(1)
    assert reached == list(range(depth, 0, -1))


def test_a_second_signal_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        raise KeyboardInterrupt


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_block_that_waits_is_interrupted(depth: int, is_early: bool) -> None:
    reached: list[str] = []

    def nested(level: int) -> None:
        if level:
            with deferred_interrupt():
                nested(level - 1)
                reached.append("after")
            return
        if is_early and depth:
            interrupt()
        reached.append("before")
        with interruptible():
            interrupt()
            reached.append("waiting")

    with pytest.raises(KeyboardInterrupt):
        nested(depth)
    assert reached == ["before"]


def test_signals_behind_a_wait_are_deferred_again() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        with interruptible():
            pass
        interrupt()
        reached.append("done")
    assert reached == ["done"]


def test_a_signal_that_is_deferred_can_be_delivered() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as deferral:  # noqa: PT012
        deferral.deliver()
        interrupt()
        reached.append("deferred")
        deferral.deliver()
        reached.append("after")
    assert reached == ["deferred"]
    assert deferred_interrupt.outermost is None


def test_an_exception_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="why"), deferred_interrupt():  # noqa: PT012
        interrupt()
        raise ValueError("why")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupt():
        interrupt()
        interrupt()
        with interruptible():
            interrupt()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_other_threads_defer_nothing() -> None:
    found: list[object] = []

    def run() -> None:
        with deferred_interrupt(), interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
