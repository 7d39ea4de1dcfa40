"""The files and batches of a server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.responses import Response

from quire.config import BatchConfig
from quire.server.batches.answers import Batch
from quire.server.batches.directory import BatchDirectory, StoredBytes
from quire.server.batches.job import BatchJob, Turns
from quire.server.batches.records import Records
from quire.server.batches.requests import answer_line
from quire.server.wire.errors import UNAVAILABLE, ApiError

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_UNFINISHED = 100
"""Maximum number of unfinished batches per tenant."""

CLOSE_TIMEOUT = 2.0
"""Seconds for jobs to finish disk access when the server stops."""

log = logging.getLogger(__name__)


class Batches:
    """The stored files and batches of a server, and the jobs of unfinished batches.

    Args:
        directory: their directory, which is closed with them.
        config: their limits.
    """

    def __init__(self, directory: BatchDirectory, config: BatchConfig) -> None:
        self.directory = directory
        self.config = config
        self.records = Records(directory.database_path)
        self.stored = StoredBytes(config.max_stored_file_bytes)
        self.num_uploads = 0
        self._turns = Turns(config.max_batch_requests)
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._app: Starlette | None = None

    async def start(self, app: Starlette) -> None:
        """Resume unfinished batches; `app` answers their requests.

        Raises:
            ApiError: the database cannot be used.
            OSError: the directory cannot be used.
        """
        self._app = app
        self.stored.load(await self.records.num_bytes_by_tenant())
        jobs = [self._job(tenant, batch) for tenant, batch in await self.records.unfinished_batches()]
        kept = await self.records.file_ids()
        kept.update(file_id for job in jobs for file_id in (job.output_id, job.errors_id))
        await self.directory.run(lambda: self.directory.remove_all_but(kept))
        for job in jobs:
            self._start(job)

    async def close(self) -> None:
        """Stop all jobs, and release the directory to other servers."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_TIMEOUT)
        await self.records.close()
        self.directory.close()

    async def add(self, tenant: str, batch: Batch) -> None:
        """Start a batch.

        Raises:
            ApiError: 429: the tenant has too many; 503: the database failed.
        """
        unfinished = sum(job.tenant == tenant for job in self._jobs.values())
        if unfinished >= MAX_UNFINISHED:
            raise ApiError(
                429,
                f"{unfinished} batches have not ended, which is the limit; try again later",
                kind="rate_limit_error",
                code="too_many_batches",
            )
        job = self._job(tenant, batch)
        self._jobs[batch.id] = job  # from now on, it counts and its input cannot be deleted
        try:
            await self.records.add_batch(tenant, batch)
        except BaseException:
            del self._jobs[batch.id]
            raise
        self._start(job)

    def job_of(self, tenant: str, batch_id: str) -> BatchJob | None:
        """Return the job of a batch that has not ended."""
        job = self._jobs.get(batch_id)
        return job if job is not None and job.tenant == tenant else None

    def is_input(self, file_id: str) -> bool:
        """Return whether a batch that has not ended reads a file."""
        return any(job.batch.input_file_id == file_id for job in self._jobs.values())

    def _job(self, tenant: str, batch: Batch) -> BatchJob:
        assert self._app is not None, "start has not been called"
        return BatchJob(
            tenant,
            batch,
            directory=self.directory,
            records=self.records,
            stored=self.stored,
            turns=self._turns,
            answer=self._answer,
            max_body_bytes=self._app.state.context.config.max_body_bytes,
        )

    def _start(self, job: BatchJob) -> None:
        self._jobs[job.batch.id] = job
        task = asyncio.create_task(job.run())
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            del self._jobs[job.batch.id]

        task.add_done_callback(ended)

    async def _answer(self, tenant_name: str, url: str, request_id: str, body: bytes) -> Response:
        assert self._app is not None
        tenant = self._app.state.context.tenants.of_name(tenant_name)
        if tenant is None:
            return ApiError(
                503,
                f"the tenant {tenant_name!r} is not in the server's key file",
                kind=UNAVAILABLE,
                code="no_tenant",
            ).response()
        return await answer_line(self._app, tenant, url, request_id, body)
