"""The life of one batch, from checking its input to its last result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import msgspec
from msgspec import Raw
from starlette.responses import Response

from quire.server.batches.answers import (
    Batch,
    BatchError,
    BatchErrors,
    FileObject,
    LineError,
    LineResponse,
    ResultLine,
)
from quire.server.batches.directory import BatchDirectory, StoredBytes
from quire.server.batches.input_lines import InputCheck, InputLine, InputLines, parsed_line
from quire.server.batches.records import Records
from quire.server.batches.results import ResultFile, Results
from quire.server.http.stopping import finished_unless_set

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5
"""Initial back-off in seconds before resending a request to a full engine; doubles each time."""

MAX_DELAY = 30.0  # seconds

RESTART_DELAY = 10.0
"""Back-off in seconds after a disk error."""

_REFUSED = (429, 503)  # temporarily

Answer = Callable[[str, str, str, bytes], Awaitable[Response]]
"""Answers a tenant's request to a path, under an id, with a body."""

EarlyEnd = Literal["cancelled", "expired"]

_NOT_SERVED: dict[EarlyEnd, LineError] = {
    "cancelled": LineError(
        code="batch_cancelled", message="the batch was cancelled before the request was served"
    ),
    "expired": LineError(
        code="batch_expired", message="the request was not served within the batch's completion_window"
    ),
}


class _NoInputError(Exception):
    """The input file has been deleted."""


class Turns:
    """Fair scheduling of requests across batches.

    A tenant's batches are served one after another, and the requests of all tenants in turn.

    Args:
        max_requests: maximum number of requests served at once.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.requests = asyncio.Semaphore(max_requests)
        self.checks = asyncio.Lock()
        self._tenants: dict[str, asyncio.Lock] = {}

    def of(self, tenant: str) -> asyncio.Lock:
        """Return the lock that a tenant's batch holds while it is served."""
        return self._tenants.setdefault(tenant, asyncio.Lock())


class BatchJob:
    """A batch that has not ended.

    Args:
        tenant: name of its tenant.
        batch: its state.
        directory, records, stored: those of the server.
        turns: scheduling across all batches.
        answer: answers its requests.
        max_body_bytes: maximum size of a request's body.
    """

    def __init__(
        self,
        tenant: str,
        batch: Batch,
        *,
        directory: BatchDirectory,
        records: Records,
        stored: StoredBytes,
        turns: Turns,
        answer: Answer,
        max_body_bytes: int,
    ) -> None:
        self.tenant = tenant
        self.batch = batch
        self._directory = directory
        self._records = records
        self._stored = stored
        self._turns = turns
        self._answer = answer
        self._max_body_bytes = max_body_bytes
        self._key = batch.id.removeprefix("batch_")
        self._num_charged = 0  # bytes of results counted as stored
        self._early_end: EarlyEnd | None = None
        self._has_early_end = asyncio.Event()
        if batch.status == "cancelling":
            self._end_early("cancelled")

    @property
    def output_id(self) -> str:
        """Id of the output file, once it exists."""
        return f"file-{self._key}-output"

    @property
    def errors_id(self) -> str:
        """Id of the error file, once it exists."""
        return f"file-{self._key}-errors"

    async def cancel(self) -> None:
        """Cancel the batch; running requests end without an answer.

        Raises:
            ApiError: 503: the database failed.
        """
        if self._early_end is None and self.batch.status in ("validating", "in_progress"):
            self.batch.status, self.batch.cancelling_at = "cancelling", _now()
            self._end_early("cancelled")
            await self._records.put_batch(self.tenant, self.batch)

    async def run(self) -> None:
        """Serve the batch to its end, retrying after disk errors."""
        expiry = asyncio.get_running_loop().call_later(
            max(0.0, self.batch.expires_at - time.time()), self._end_early, "expired"
        )
        try:
            while True:
                try:
                    await self._advance()
                    return
                except _NoInputError:
                    await self._fail([BatchError(code="no_input", message="the input file is gone")])
                    return
                except Exception:
                    log.exception("batch %s has failed, and resumes in %g s", self.batch.id, RESTART_DELAY)
                    await asyncio.sleep(RESTART_DELAY)
        finally:
            expiry.cancel()

    def _end_early(self, how: EarlyEnd) -> None:
        if self._early_end is None:
            self._early_end = how
            self._has_early_end.set()

    async def _advance(self) -> None:
        if self.batch.in_progress_at is None and not await self._passes_check():
            return
        turn = self._turns.of(self.tenant)
        has_turn = await finished_unless_set(self._has_early_end, turn.acquire())
        try:
            async with self._results() as results:
                await self._serve_lines(results)
                await self._finish(results)
        finally:
            if has_turn:
                turn.release()

    async def _passes_check(self) -> bool:
        """Check the input; return whether it is valid. If not, the batch fails."""
        check = InputCheck(self.batch.endpoint, self._max_body_bytes)
        async with self._turns.checks, self._input() as lines:
            while not check.is_over and await self._directory.run(lambda: _check_piece(check, lines)):
                pass
        check.finish()
        if check.errors:
            await self._fail(check.errors)
            return False
        batch = self.batch
        batch.request_counts.total, batch.in_progress_at = check.num_lines, _now()
        if batch.status == "validating":
            batch.status = "in_progress"
        await self._records.put_batch(self.tenant, batch)
        return True

    async def _fail(self, errors: list[BatchError]) -> None:
        self.batch.errors = BatchErrors(data=errors)
        self.batch.status, self.batch.failed_at = "failed", _now()
        await self._records.put_batch(self.tenant, self.batch)

    async def _serve_lines(self, results: Results) -> None:
        """Answer all remaining requests, a few at a time."""
        free = asyncio.Semaphore(self._turns.max_requests)

        async def serve(number: int, line: bytes) -> None:
            try:
                await self._serve_line(results, number, parsed_line(line))
            finally:
                free.release()

        async with self._input() as lines, asyncio.TaskGroup() as group:
            while piece := await self._directory.run(lines.next_piece):
                for number, line in piece:
                    if number in results.done:
                        continue
                    assert line is not None  # checked before
                    await free.acquire()
                    group.create_task(serve(number, line))

    async def _serve_line(self, results: Results, number: int, line: InputLine) -> None:
        result = ResultLine(id=f"batch_req_{self._key}_{number}", custom_id=line.custom_id)

        async def answer() -> None:
            answer = await self._accepted_answer(f"batch_{self._key}_{number}", bytes(line.body))
            result.response = LineResponse(
                status_code=answer.status_code,
                request_id=f"batch_{self._key}_{number}",
                body=Raw(answer.body),
            )

        await finished_unless_set(self._has_early_end, answer())
        if result.response is None:
            assert self._early_end is not None
            result.error = _NOT_SERVED[self._early_end]
        encoded = result.encoded()
        if not self._stored.has_room(self.tenant, len(encoded)):
            result.response, result.error = None, self._no_room()
            encoded = result.encoded()
        self._charge(len(encoded))
        await self._directory.run(lambda: results.append(number, result, encoded))
        self._count(results)

    async def _accepted_answer(self, request_id: str, body: bytes) -> Response:
        """Return the answer to a request, retrying while the engine has no room for it."""
        delay = FIRST_DELAY
        while True:
            async with self._turns.requests:
                answer = await self._answer(self.tenant, self.batch.endpoint, request_id, body)
            if answer.status_code not in _REFUSED:
                return answer
            asked = answer.headers.get("retry-after", "0")
            wait = max(delay, min(float(asked) if asked.isdecimal() else 0.0, MAX_DELAY))
            await asyncio.sleep(wait * random.uniform(1.0, 1.5))
            delay = min(2 * delay, MAX_DELAY)

    def _no_room(self) -> LineError:
        return LineError(
            code="storage_limit_exceeded",
            message=f"there is no room for the answer: {self._stored.limit} bytes may be stored (the "
            "server's max_stored_file_bytes)",
        )

    def _count(self, results: Results) -> None:
        counts = self.batch.request_counts
        counts.completed = results.num_completed
        counts.failed = len(results.done) - results.num_completed

    async def _finish(self, results: Results) -> None:
        """Publish the result files to the tenant, then mark the batch as ended."""
        batch, status = self.batch, self._early_end or "completed"
        if status == "completed":
            batch.status = "finalizing"
        batch.finalizing_at = _now()
        await self._records.put_batch(self.tenant, batch)
        await self._directory.run(results.sync)
        await self._directory.run(self._directory.sync)
        files = [
            FileObject(
                id=one.path.name,
                bytes=one.num_bytes,
                created_at=_now(),
                filename=f"{one.path.name}.jsonl",
                purpose="batch_output",
            )
            for one in results.files
        ]
        ids = {file.id for file in files}
        ended = msgspec.structs.replace(
            batch,
            status=status,
            output_file_id=self.output_id if self.output_id in ids else None,
            error_file_id=self.errors_id if self.errors_id in ids else None,
            **{f"{status}_at": _now()},
        )
        await self._records.put_batch(self.tenant, ended, files)
        self.batch = ended

    @contextlib.asynccontextmanager
    async def _input(self) -> AsyncIterator[InputLines]:
        path = self._directory.path_of(self.batch.input_file_id)
        try:
            lines = await self._directory.run(lambda: InputLines(path, self._max_body_bytes))
        except FileNotFoundError:
            raise _NoInputError from None
        try:
            yield lines
        finally:
            await self._directory.run(lines.close)

    @contextlib.asynccontextmanager
    async def _results(self) -> AsyncIterator[Results]:
        """Open the result files for appending; their bytes count as stored unless something fails."""
        paths = [self._directory.path_of(one) for one in (self.output_id, self.errors_id)]
        results = await self._directory.run(
            lambda: Results(*(ResultFile(path, f"batch_req_{self._key}") for path in paths))
        )
        self._num_charged = 0
        try:
            await self._directory.run(results.resume)
            self._charge(results.num_bytes)
            self._count(results)
            yield results
        except BaseException:
            self._charge(-self._num_charged)
            raise
        finally:
            await self._directory.run(results.close)  # in the thread that may still be writing

    def _charge(self, num_bytes: int) -> None:
        """Count bytes of the results as stored."""
        self._stored.note(self.tenant, num_bytes)
        self._num_charged += num_bytes


def _check_piece(check: InputCheck, lines: InputLines) -> bool:
    """Check the next lines; return whether there were any."""
    piece = lines.next_piece()
    for number, line in piece:
        check.check(number, line)
        if check.is_over:
            break
    return bool(piece)


def _now() -> int:
    return int(time.time())
