"""A spare: a process that has imported what an engine imports, and waits to become the next engine."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading

from quire.engine.process.standby_signs import SPARE_IMPORTED

logger = logging.getLogger(__name__)


def wait_as_spare(front: int, output: int, check_interval: float) -> bool:
    """Import what an engine imports, and return when the front has written to standard input, or closed it.

    If something cannot be imported, the process exits.

    Args:
        front: process id of the parent.
        output: descriptor of the original standard output.
        check_interval: seconds between checks that the front is still the parent.

    Returns:
        False: the front has ended, while a fork of it keeps the pipe open.
    """
    # In a thread: who has taken the idle priority may not be allowed to leave it.
    threading.Thread(target=_import_when_idle, args=(output,), daemon=True).start()
    while os.getppid() == front:
        readable, _, _ = select.select([sys.stdin], [], [], check_interval)
        if readable:
            return True
    return False


def _import_when_idle(output: int) -> None:
    """Import on processors that nobody else wants."""
    with contextlib.suppress(OSError):  # not every sandbox and C library lets threads do that
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        import quire.engine.core
        import quire.engine.loop  # noqa: F401
        from quire.engine.building.assembly import import_ahead

        import_ahead()
        os.write(output, SPARE_IMPORTED)
    except BaseException:
        logger.exception("a spare engine process cannot import what engines need")
        os._exit(1)
