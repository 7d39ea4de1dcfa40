"""The endpoints below /v1/files and /v1/batches."""

from __future__ import annotations

from quire.server.batches.answers import Batch, BatchList, DeletedFile, FileList, FileObject
from quire.server.batches.body import BatchRequest, FileUpload
from quire.server.batches.handlers import (
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    get_batch,
    get_file,
    get_file_content,
    list_batches,
    list_files,
)
from quire.server.wire.openapi import Endpoint

_ERRORS = {
    400: "The request is invalid; `param` is the field at fault.",
    404: "It is not there, or the server has no batch_dir.",
    503: "The disk or the database is not available.",
}
_UPLOAD_ERRORS = {
    **_ERRORS,
    409: "There are too many files.",
    413: "The file is too large, or the tenant's files are.",
    415: "The body is not multipart/form-data.",
    429: "Too many files are being received.",
    507: "The disk is full.",
}

BATCH_ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/files",
        handler=create_file,
        form=FileUpload,
        answer=FileObject,
        errors=_UPLOAD_ERRORS,
    ),
    Endpoint(method="GET", path="/v1/files", handler=list_files, answer=FileList, errors=_ERRORS),
    Endpoint(
        method="GET",
        path="/v1/files/{file_id}/content",
        handler=get_file_content,
        answer=None,
        media_type="application/octet-stream",
        errors=_ERRORS,
    ),
    Endpoint(method="GET", path="/v1/files/{file_id}", handler=get_file, answer=FileObject, errors=_ERRORS),
    Endpoint(
        method="DELETE",
        path="/v1/files/{file_id}",
        handler=delete_file,
        answer=DeletedFile,
        errors={**_ERRORS, 409: "A batch that has not ended reads the file."},
    ),
    Endpoint(
        method="POST",
        path="/v1/batches",
        handler=create_batch,
        body=BatchRequest,
        answer=Batch,
        errors={
            **_ERRORS,
            413: "The body is too large.",
            415: "The body is not JSON.",
            429: "Too many batches have not ended.",
        },
    ),
    Endpoint(method="GET", path="/v1/batches", handler=list_batches, answer=BatchList, errors=_ERRORS),
    Endpoint(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        handler=cancel_batch,
        answer=Batch,
        errors={**_ERRORS, 409: "The batch has ended."},
    ),
    Endpoint(method="GET", path="/v1/batches/{batch_id}", handler=get_batch, answer=Batch, errors=_ERRORS),
)
