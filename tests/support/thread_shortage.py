"""A system that has no thread to spare."""

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def no_threads_to_spare() -> Iterator[None]:
    """Let no thread be started in this context."""
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        yield
