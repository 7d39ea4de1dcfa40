"""The routes below /v1/files and /v1/batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.errors import InvalidRequestError
from quire.server.batches.answers import (
    KEPT_ELSEWHERE,
    Batch,
    BatchList,
    DeletedFile,
    FileList,
    FileObject,
    RequestCounts,
)
from quire.server.batches.body import BatchQuery, BatchRequest, FileQuery, FileUpload
from quire.server.batches.directory import disk_failure
from quire.server.batches.service import Batches
from quire.server.context import leniency_of, tenant_of
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.leniency import Leniency
from quire.server.wire.openapi import Endpoint
from quire.server.wire.validation import read_query

if TYPE_CHECKING:
    from quire.server.batches.upload import UploadForm

MAX_FILES = 10_000
"""Maximum number of files per tenant."""

MAX_UPLOADS = 8
"""Maximum number of concurrent uploads."""

MAX_LISTED_FILES = 1_000
COMPLETION_WINDOW = 86_400  # seconds


async def create_file(request: Request) -> Response:
    """Store a file of requests: multipart/form-data with the fields file and purpose."""
    batches, tenant = _batches_of(request), tenant_of(request).name
    from quire.server.batches.upload import UploadForm, boundary_of, receive_form  # imported only when needed

    limit = batches.config.max_file_bytes
    boundary = boundary_of(request, limit)
    file_id = batches.directory.new_id("file-")
    form = UploadForm(boundary, batches.directory.path_of(file_id), limit)
    async with _uploading(batches, tenant, form) as has_grown:
        await receive_form(request, form, batches.directory, has_grown)
        purpose = form.fields.get("purpose", b"").decode(errors="replace")
        if purpose != "batch":
            raise InvalidRequestError(f"purpose is {purpose!r:.80}; it must be 'batch'", param="purpose")
        _note_without_effect(form.fields, leniency_of(request))
        await batches.directory.run(batches.directory.sync)
        file = FileObject(
            id=file_id,
            bytes=form.num_bytes,
            created_at=int(time.time()),
            filename=form.filename or "file",
            purpose="batch",
        )
        if not await batches.records.add_file(tenant, file, MAX_FILES):
            raise ApiError(409, f"there are {MAX_FILES} files, which is the limit; delete some", param="file")
    return json_response(file)


async def list_files(request: Request) -> Response:
    """List files, the newest first unless `order` is asc."""
    batches, query = _batches_of(request), read_query(request, FileQuery)
    limit = min(query.limit, MAX_LISTED_FILES)
    files = await batches.records.list_files(
        tenant_of(request).name,
        limit=limit + 1,
        after=query.after,
        from_time=query.from_time,
        is_ascending=query.order == "asc",
        purpose=query.purpose,
    )
    page = files[:limit]
    return json_response(
        FileList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(files) > limit,
        )
    )


async def get_file(request: Request) -> Response:
    """Describe a file."""
    return json_response(await _file(request, request.path_params["file_id"]))


async def get_file_content(request: Request) -> Response:
    """Return the bytes of a file."""
    file = await _file(request, request.path_params["file_id"])
    return FileResponse(
        _batches_of(request).directory.path_of(file.id),
        media_type="application/octet-stream",
        filename=file.filename,
    )


async def delete_file(request: Request) -> Response:
    """Delete a file, unless a batch that has not ended reads it."""
    batches, tenant = _batches_of(request), tenant_of(request).name
    file = await _file(request, request.path_params["file_id"])
    if batches.is_input(file.id):
        raise ApiError(
            409, "a batch that has not ended reads the file; cancel that first", code="file_in_use"
        )
    if not await batches.records.delete_file(tenant, file.id):
        raise _missing(batches, "file", file.id)
    batches.stored.note(tenant, -file.bytes)
    path = batches.directory.path_of(file.id)
    try:
        await batches.directory.run(lambda: path.unlink(missing_ok=True))
    except OSError as error:
        raise disk_failure(error) from None
    return json_response(DeletedFile(id=file.id))


async def create_batch(request: Request, body: BatchRequest) -> Response:
    """Create a batch from a file of requests, to be answered within 24 hours."""
    batches, tenant = _batches_of(request), tenant_of(request).name
    file = await batches.records.get_file(tenant, body.input_file_id)
    if file is None:
        raise _missing(batches, "file", body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidRequestError(
            f"the file {file.id!r} has the purpose {file.purpose}; it must be batch", param="input_file_id"
        )
    now = int(time.time())
    batch = Batch(
        id=batches.directory.new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + COMPLETION_WINDOW,
        request_counts=RequestCounts(),
        metadata=body.metadata,
    )
    await batches.add(tenant, batch)
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """List batches, the newest first."""
    batches, tenant, query = _batches_of(request), tenant_of(request).name, read_query(request, BatchQuery)
    found = await batches.records.list_batches(
        tenant, limit=query.limit + 1, after=query.after, from_time=query.from_time
    )
    page = [_current(batches, tenant, batch) for batch in found[: query.limit]]
    return json_response(
        BatchList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(found) > query.limit,
        )
    )


async def get_batch(request: Request) -> Response:
    """Return the status of a batch."""
    return json_response(await _batch(request))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; finished answers are kept."""
    batch = await _batch(request)
    job = _batches_of(request).job_of(tenant_of(request).name, batch.id)
    if job is None:
        raise ApiError(409, f"the batch {batch.id!r} is {batch.status} already", code="batch_ended")
    await job.cancel()
    return json_response(job.batch)


@contextlib.asynccontextmanager
async def _uploading(batches: Batches, tenant: str, form: UploadForm) -> AsyncIterator[Callable[[], None]]:
    """Manage a form's file, which is removed if anything fails.

    Yields a function to call when the file has grown, which refuses it beyond the tenant's limit.
    """
    if batches.num_uploads >= MAX_UPLOADS:
        raise ApiError(
            429,
            f"{batches.num_uploads} files are being received, which is the limit; try again later",
            kind="rate_limit_error",
            code="too_many_uploads",
            headers={"Retry-After": "1"},
        )
    num_counted = 0

    def count() -> None:
        nonlocal num_counted
        num_new = form.num_bytes - num_counted
        if not batches.stored.has_room(tenant, num_new):
            raise ApiError(
                413,
                f"there is no room for the file: {batches.stored.limit} bytes may be stored (the server's "
                "max_stored_file_bytes); delete other files",
                param="file",
                code="storage_limit_exceeded",
            )
        batches.stored.note(tenant, num_new)
        num_counted += num_new

    batches.num_uploads += 1
    try:
        yield count
    except BaseException as error:
        batches.stored.note(tenant, -num_counted)
        await batches.directory.run(form.discard)
        if isinstance(error, OSError):
            raise disk_failure(error) from None
        raise
    finally:
        batches.num_uploads -= 1


def _note_without_effect(names: Iterable[str], leniency: Leniency) -> None:
    """Report fields of an upload that have no effect, such as expires_after."""
    for name in names:
        if name == "purpose":
            continue
        if leniency.is_strict:
            raise InvalidRequestError(f"{name!r:.80} has no effect; leave it out", param=name[:80])
        leniency.ignore(name.partition("[")[0])  # forms write objects as expires_after[seconds]


async def _file(request: Request, file_id: str) -> FileObject:
    batches = _batches_of(request)
    file = await batches.records.get_file(tenant_of(request).name, file_id)
    if file is None:
        raise _missing(batches, "file", file_id)
    return file


async def _batch(request: Request) -> Batch:
    batches, tenant, batch_id = _batches_of(request), tenant_of(request).name, request.path_params["batch_id"]
    batch = await batches.records.get_batch(tenant, batch_id)
    if batch is None:
        raise _missing(batches, "batch", batch_id)
    return _current(batches, tenant, batch)


def _current(batches: Batches, tenant: str, batch: Batch) -> Batch:
    """Return a batch's current state, from its job if it has not ended."""
    job = batches.job_of(tenant, batch.id)
    return batch if job is None else job.batch


def _batches_of(request: Request) -> Batches:
    batches: Batches | None = request.app.state.batches
    if batches is None:
        raise ApiError(
            404,
            "this server keeps no files and no batches; start it with --batch-dir DIRECTORY",
            code="no_batches",
        )
    return batches


def _missing(batches: Batches, kind: str, given_id: str, param: str | None = None) -> ApiError:
    """Return the answer to an unknown id; the code says whether another directory may have it."""
    code = KEPT_ELSEWHERE if batches.directory.is_elsewhere(given_id) else f"{kind}_not_found"
    return ApiError(404, f"there is no {kind} {given_id!r:.200}", param=param, code=code)


_ERRORS = {
    400: "The request is invalid; `param` is the field at fault.",
    404: "It does not exist, or the server has no batch_dir.",
    503: "The disk or the database is not available.",
}
_UPLOAD_ERRORS = {
    **_ERRORS,
    409: "There are too many files.",
    413: "The file is too large, or all the tenant's files together.",
    415: "The body is not multipart/form-data.",
    429: "Too many files are being received.",
    507: "The disk is full.",
}

BATCH_ENDPOINTS = (
    Endpoint("POST", "/v1/files", create_file, FileObject, form=FileUpload, errors=_UPLOAD_ERRORS),
    Endpoint("GET", "/v1/files", list_files, FileList, errors=_ERRORS),
    Endpoint(
        "GET",
        "/v1/files/{file_id}/content",
        get_file_content,
        None,
        media_type="application/octet-stream",
        errors=_ERRORS,
    ),
    Endpoint("GET", "/v1/files/{file_id}", get_file, FileObject, errors=_ERRORS),
    Endpoint(
        "DELETE",
        "/v1/files/{file_id}",
        delete_file,
        DeletedFile,
        errors={**_ERRORS, 409: "A batch that has not ended reads the file."},
    ),
    Endpoint(
        "POST",
        "/v1/batches",
        create_batch,
        Batch,
        body=BatchRequest,
        errors={
            **_ERRORS,
            413: "The body is too large.",
            415: "The body is not JSON.",
            429: "Too many batches have not ended.",
        },
    ),
    Endpoint("GET", "/v1/batches", list_batches, BatchList, errors=_ERRORS),
    Endpoint(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        Batch,
        errors={**_ERRORS, 409: "The batch has ended."},
    ),
    Endpoint("GET", "/v1/batches/{batch_id}", get_batch, Batch, errors=_ERRORS),
)
