"""An SQLite database, used in a thread.

Failures become error answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quire.front.text.worker_thread import TooManyJobsError, WorkerThread
from quire.server.wire.errors import ApiError

T = TypeVar("T")

IN_MEMORY = ":memory:"

TIMEOUT = 5.0
"""Timeout of database calls, in seconds."""

MAX_WAITING = 1024  # calls


class Database:
    """A database that is opened when it is first used.

    Args:
        path: path of its file; `IN_MEMORY`: it ends with the server.
        script: SQL that sets it up, each time it is opened.
        thread_name: name of the thread.
        unavailable: makes the error of a request from a description of the problem.
    """

    def __init__(
        self, path: str, script: str, *, thread_name: str, unavailable: Callable[[str], ApiError]
    ) -> None:
        self._path = path
        self._script = script
        self._unavailable = unavailable
        self._thread = WorkerThread(thread_name, MAX_WAITING)
        self._connection: sqlite3.Connection | None = None

    async def run(self, call: Callable[[sqlite3.Connection], T]) -> T:
        """Run `call` in the database thread, in a transaction, and return its result.

        Raises:
            ApiError: the error from `unavailable`: the database has failed or timed out.
        """
        try:
            async with asyncio.timeout(TIMEOUT):
                return await asyncio.wrap_future(self._thread.submit(lambda: self._within(call)))
        except TimeoutError:
            problem = f"has not answered within {TIMEOUT:g} s"
        except TooManyJobsError as error:
            problem = f"is too busy: {error}"
        except (sqlite3.Error, OSError) as error:
            problem = f"has failed: {error}"
        raise self._unavailable(problem)

    async def close(self) -> None:
        """Close the database, unless it hangs."""
        with contextlib.suppress(ApiError):
            await self.run(lambda connection: connection.close())

    def _within(self, call: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            if self._path != IN_MEMORY:
                Path(self._path).touch(mode=0o600)  # what clients send is private
            connection = sqlite3.connect(self._path, check_same_thread=False)
            connection.executescript(self._script)
            self._connection = connection
        with self._connection:
            return call(self._connection)
