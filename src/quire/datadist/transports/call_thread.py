"""Calls into a library that may hang, from a thread of their own, so that nobody waits beyond a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

A = TypeVarTuple("A")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class CallFailedError(ConnectionError):
    """The library raised, has not returned in time, or returned what it must not."""


class CallThread:
    """Runs calls one after another.

    What the library raises becomes a `CallFailedError` with its text only: the exception itself would keep
    the library's objects alive.

    Args:
        library: name for errors.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        self._thread = threading.Thread(
            target=_run, args=(self._jobs, library), name=f"datadist-{library}", daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable[[Unpack[A]], T], *arguments: *A) -> Future[T]:
        """Let the thread call a function; does not wait, and may be called by a finalizer."""
        future: Future[T] = Future()
        self._jobs.put((future, function, arguments))
        return future

    def call(self, deadline: float, function: Callable[[Unpack[A]], T], *arguments: *A) -> T:
        """Return what a function returns.

        Raises:
            CallFailedError: it raised, or has not returned by `deadline`, or an earlier call still has not.
        """
        overdue = self._overdue
        if overdue is not None and not overdue.done():
            raise CallFailedError(f"an earlier call of {self._library} has not returned yet")
        return self.result(self.submit(function, *arguments), deadline)

    def result(self, future: Future[T], deadline: float) -> T:
        """Return what a call that was submitted returns; raises what `call` does."""
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            if future.done():
                raise  # the function's own
            self._overdue = future
        raise CallFailedError(f"a call of {self._library} has not returned in time")

    def end(self) -> None:
        """Let the thread end after the calls that were submitted."""
        self._jobs.put(None)


def _run(jobs: queue.SimpleQueue[_Job | None], library: str) -> None:
    while (job := jobs.get()) is not None:
        future, function, arguments = job
        reason = None
        try:
            future.set_result(function(*arguments))
        except (CallFailedError, TimeoutError) as error:
            future.set_exception(error)
        except BaseException as error:
            reason = f"{library} raised {type(error).__name__}: {error}"
        if reason is not None:
            future.set_exception(CallFailedError(reason))
        del job, future, function, arguments  # may keep memory alive
