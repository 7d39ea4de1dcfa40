"""In place of a tier's threads: tasks that run at once, or when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from quire.kv.tiers.worker_threads import WorkerThreads


class InlineThreads(WorkerThreads):
    """Runs each task when it is submitted, and swallows what it raises, as threads do.

    Args:
        is_held: keep the tasks until `run_held`.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        super().__init__("inline", 0)
        self.is_held = is_held
        self.held: list[Callable[[], None]] = []
        self.num_failed = 0
        self.seconds_stuck = 0.0

    def submit(self, task: Callable[[], None]) -> None:
        self.held.append(task)
        if not self.is_held:
            self.run_held()

    def max_run_time(self) -> float:
        return self.seconds_stuck

    def run_held(self, count: int | None = None) -> None:
        now, self.held = self.held[:count], self.held[len(self.held[:count]) :]
        for task in now:
            try:
                task()
            except Exception:
                self.num_failed += 1
