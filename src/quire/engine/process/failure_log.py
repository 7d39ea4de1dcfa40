"""Why engines could not be built, with tracebacks, in a file: what the terminal shows of it is one line."""

from __future__ import annotations

import datetime
import logging
import traceback
from pathlib import Path

from quire.engine.messages import ErrorInfo
from quire.errors import QuireError
from quire.state_directory import state_directory

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 1 << 20  # from which the file begins anew


def log_failed_start(error: Exception) -> ErrorInfo:
    """Append the traceback of an engine that could not be built to engine.log in the state directory.

    Returns:
        What the front is told: the error, with the name of the file if the error alone does not say what to
        do. Without the file, the traceback of such an error is on standard error.
    """
    info = ErrorInfo.of(error)
    explains_itself = isinstance(error, (QuireError, OSError))
    try:
        file = _append("".join(traceback.format_exception(error)))
    except (OSError, RuntimeError):  # no directory that may be written, or no home at all
        if not explains_itself:
            logger.error("the engine could not be built", exc_info=error)
        return info
    if not explains_itself:
        info.message += f" (the traceback is in {file})"
    return info


def _append(text: str) -> Path:
    file = state_directory() / "engine.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    is_full = file.exists() and file.stat().st_size >= MAX_LOG_BYTES
    with file.open("w" if is_full else "a", encoding="utf-8", errors="backslashreplace") as opened:
        opened.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} the engine could not be built\n{text}\n")
    return file
