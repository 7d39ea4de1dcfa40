"""Threads for blocking work, so that the engine's step never blocks, and their counters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from quire.kv.connectors.stats import KVConnectorStats

logger = logging.getLogger(__name__)

T = TypeVar("T")
Task = Callable[[], None]


class WorkerThreads:
    """Runs tasks in the order in which they were submitted. A task that raises ends only itself.

    The threads start with the first task, and do not keep the process alive.

    Args:
        name: name of the threads.
        num_threads: tasks that run at a time.
        clock: returns seconds.
    """

    def __init__(self, name: str, num_threads: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._clock = clock
        self._began: dict[int, float] = {}  # when the task of each busy thread began
        self._name = name
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []

    def submit(self, task: Task) -> None:
        """Run a task when a thread is free."""
        self._tasks.put(task)
        if not self._threads:
            self._start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function when a thread is free; what it returns or raises is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.submit(run)
        return future

    def max_run_time(self) -> float:
        """Return for how many seconds the oldest running task has been running; 0 if there is none."""
        began = list(self._began.values())
        return self._clock() - min(began) if began else 0.0

    def close(self, timeout: float) -> None:
        """Run what was submitted, but wait for it at most `timeout` seconds."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = threading.Thread(
                target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has none to spare; what is submitted next tries again
                if not self._threads:
                    logger.warning("cannot start a thread of %s; its tasks wait", self._name)
                return
            self._threads.append(thread)

    def _run(self, number: int) -> None:
        while (task := self._tasks.get()) is not None:
            self._began[number] = self._clock()
            try:
                task()
            except Exception:
                logger.exception("a task of %s failed", self._name)
            finally:
                del self._began[number]


class Counters:
    """Counts in the fields of a `KVConnectorStats`; several threads may add to it."""

    def __init__(self) -> None:
        self.stats = KVConnectorStats()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        """Add numbers to the fields of these names."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)
