"""Jobs in a daemon thread, which neither the event loop nor the exit of the process waits for."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TooManyJobsError(Exception):
    """The maximum number of jobs is waiting."""


class Job(concurrent.futures.Future[T], Generic[T]):
    """A call, and its future result; cancelled before it begins, it is not run."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def run(self) -> None:
        """Run the call, unless it has been cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class WorkerThread:
    """Runs jobs one after another, in a daemon thread that ends when idle.

    Args:
        name: name of the thread.
        max_waiting: maximum number of jobs that wait.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._jobs: collections.deque[Job[Any]] = collections.deque()
        self._is_running = False

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Return the job that will run `call`.

        Raises:
            TooManyJobsError: too many jobs wait.
            RuntimeError: no thread can be started.
        """
        job = Job(call)
        with self._lock:
            if len(self._jobs) >= self._max_waiting:
                raise TooManyJobsError(f"{len(self._jobs)} jobs wait; the limit is {self._max_waiting}")
            if not self._is_running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True
            self._jobs.append(job)
        return job

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            job.run()
            del job  # what it holds may be large
