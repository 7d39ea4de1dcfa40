"""Uploads as multipart/form-data, written to disk as they arrive and never held in memory whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from quire.errors import InvalidRequestError
from quire.server.batches.directory import BatchDirectory
from quire.server.wire.errors import ApiError, ClientGoneError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PIECE_BYTES = 262_144
"""Bytes buffered before they are written."""

MAX_PARTS = 16
MAX_FIELD_BYTES = 1024  # of a field's value other than the file
MAX_NAME_LENGTH = 255  # characters
_OVERHEAD = 65_536  # maximum bytes of a body besides its file


class UploadForm:
    """The contents of a form: fields by name, and one file, which is written to disk.

    Args:
        boundary: the multipart boundary.
        path: path of the new file on disk.
        max_file_bytes: maximum size of the file.

    Raises:
        InvalidRequestError: the boundary is too long.
    """

    def __init__(self, boundary: bytes, path: Path, max_file_bytes: int) -> None:
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._max_file_bytes = max_file_bytes
        self._num_parts = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._field: bytearray | None = None  # current field; None: the part is the file
        self._path = path
        self._file: int | None = None
        self._is_complete = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._more_header_name,
            "on_header_value": self._more_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._more_data,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise InvalidRequestError(f"the multipart boundary is invalid: {error}") from None

    def feed(self, data: bytes) -> None:
        """Take the next part of the body; blocks.

        Raises:
            InvalidRequestError: the form is malformed.
            ApiError: 413: the file is too large.
            OSError: the file cannot be written.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(f"the body is not valid multipart/form-data: {error}") from None

    def finish(self) -> None:
        """Sync the file to disk when the body is complete; blocks.

        Raises:
            InvalidRequestError: the form is incomplete.
            OSError: the file cannot be written.
        """
        if self._file is None:
            raise InvalidRequestError("file is missing; it is required", param="file")
        if not self._is_complete:
            raise InvalidRequestError("the body ends before the last boundary of its parts")
        os.fsync(self._file)
        self._close()

    def discard(self) -> None:
        """Remove the file; blocks."""
        if self.filename is not None:
            self._close()
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _more_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _more_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file":
            if self.filename is not None:
                raise InvalidRequestError("there are two files; send one", param="file")
            given = options.get(b"filename", b"").decode(errors="replace")
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.filename = given[:MAX_NAME_LENGTH] or "file"
            self._field = None
        else:
            self._field = self.fields[name] = bytearray()

    def _end(self) -> None:
        self._is_complete = True

    def _more_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field += data[start:end]
            if len(self._field) > MAX_FIELD_BYTES:
                raise InvalidRequestError(f"a field of the form has more than {MAX_FIELD_BYTES} bytes")
            return
        self.num_bytes += end - start
        if self.num_bytes > self._max_file_bytes:
            raise too_large(self._max_file_bytes)
        assert self._file is not None
        rest = memoryview(data)[start:end]
        while rest:
            rest = rest[os.write(self._file, rest) :]


async def receive_form(
    request: Request, form: UploadForm, directory: BatchDirectory, has_grown: Callable[[], None]
) -> None:
    """Receive a request's body into a form.

    Args:
        request: the request.
        form: the form.
        directory: the directory of the form's file.
        has_grown: called when the form's file may have grown; raises to refuse more.

    Raises:
        ClientGoneError: the connection closed before the body was complete.
        Exception: whatever `form` and `has_grown` raise.
    """
    waiting = bytearray()

    async def write() -> None:
        data = bytes(waiting)
        waiting.clear()
        await directory.run(lambda: form.feed(data))
        has_grown()

    try:
        async for chunk in request.stream():
            waiting += chunk
            if len(waiting) >= PIECE_BYTES:
                await write()
    except ClientDisconnect:
        raise ClientGoneError("the client disconnected while uploading") from None
    if waiting:
        await write()
    await directory.run(form.finish)


def boundary_of(request: Request, max_file_bytes: int) -> bytes:
    """Return the multipart boundary of a form.

    Raises:
        ApiError: 415: the body is not a form; 413: it is too large.
    """
    content_type = request.headers.get("content-type", "")
    media_type, options = parse_options_header(content_type)
    if media_type != b"multipart/form-data" or b"boundary" not in options:
        raise ApiError(415, f"Content-Type is {content_type!r:.200}; it must be 'multipart/form-data'")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding!r:.80}; files must be sent uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:18]) > max_file_bytes + _OVERHEAD:
        raise too_large(max_file_bytes)
    return options[b"boundary"]


def too_large(limit: int) -> ApiError:
    """Return the answer to an upload that is too large."""
    return ApiError(
        413,
        f"the file has more than {limit} bytes (the server's max_file_bytes)",
        param="file",
        code="file_too_large",
    )
