"""A thread that runs jobs, on a system that may have no thread to spare."""

import threading

import pytest

from quire.front.worker_thread import WorkerThread


def test_a_thread_that_cannot_be_started_is_started_for_the_next_job(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    done = []
    worker = WorkerThread("test", 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.submit(lambda: done.append("first"))
    worker.submit(lambda: done.append("second")).result(60)
    assert done == ["second"]
