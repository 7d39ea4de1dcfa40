"""Answers of /v1/files and /v1/batches, and the lines of their files, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct

KEPT_ELSEWHERE = "kept_elsewhere"
"""Error code: the id of a file or batch was made for the directory of another server."""

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class FileObject(Struct, kw_only=True):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    """Answer of GET /v1/files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, kw_only=True):
    """Answer of DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class RequestCounts(Struct, kw_only=True):
    """Numbers of all, completed and failed requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct, kw_only=True):
    """An error in a line of the input (counted from 1), or in the whole input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """The first errors of a refused input."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class Batch(Struct, kw_only=True):
    """A batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(Struct, kw_only=True):
    """Answer of GET /v1/batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineResponse(Struct, kw_only=True):
    """The answer to a request of a batch."""

    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, kw_only=True):
    """Why a request of a batch was not answered."""

    code: str
    message: str


class ResultLine(Struct, kw_only=True):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_success(self) -> bool:
        """Whether the line belongs in the output file rather than the error file."""
        return self.response is not None and self.response.status_code < 400

    def encoded(self) -> bytes:
        """Return the line as JSON with a line feed; a body that is already JSON contains none."""
        return msgspec.json.encode(self) + b"\n"
