"""A thread that runs jobs, on a system that may have no thread to spare."""

import pytest

from quire.front.text.worker_thread import WorkerThread
from thread_shortage import no_threads_to_spare


def test_a_thread_that_cannot_be_started_is_started_for_the_next_job():
    done = []
    worker = WorkerThread("test", 1)
    with no_threads_to_spare(), pytest.raises(RuntimeError, match="new thread"):
        worker.submit(lambda: done.append("first"))
    worker.submit(lambda: done.append("second")).result(60)
    assert done == ["second"]
