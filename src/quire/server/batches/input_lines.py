"""The lines of a batch's input: read in pieces, checked, and numbered."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from quire.server.batches.answers import BatchError

MAX_LINES = 50_000
"""Maximum number of requests per batch."""

MAX_ERRORS = 100
"""Maximum number of reported errors of an input."""

PIECE_BYTES = 1_048_576
"""Bytes read at a time, or one line if it is longer."""

_LINE_OVERHEAD = 4096  # bytes of a line besides its body
_PARAM = re.compile(r" - at `\$\.(\w+)`$")


class InputLine(Struct, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


_decode_line = msgspec.json.Decoder(InputLine).decode


class InputLines:
    """Reads the lines of a file that are not blank; everything blocks.

    Args:
        path: path of the file.
        max_body_bytes: maximum size of a request's body.

    Raises:
        OSError: the file does not exist.
    """

    def __init__(self, path: Path, max_body_bytes: int) -> None:
        self._file = path.open("rb")
        self._max_line_bytes = max_body_bytes + _LINE_OVERHEAD
        self._number = 0

    def next_piece(self) -> list[tuple[int, bytes | None]]:
        """Return the next lines, each with its number, or None if it is too long; empty at the end."""
        piece: list[tuple[int, bytes | None]] = []
        num_bytes = 0
        while num_bytes < PIECE_BYTES and (line := self._file.readline(self._max_line_bytes + 1)):
            self._number += 1
            num_bytes += len(line)
            if len(line) > self._max_line_bytes:
                self._skip_rest(line)
                piece.append((self._number, None))
            elif not line.isspace():
                piece.append((self._number, line))
        return piece

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _skip_rest(self, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = self._file.readline(PIECE_BYTES)


class InputCheck:
    """Checks the lines of an input one after another.

    Args:
        endpoint: path of the batch's endpoint.
        max_body_bytes: maximum size of a request's body.
    """

    def __init__(self, endpoint: str, max_body_bytes: int) -> None:
        self.errors: list[BatchError] = []
        self.num_lines = 0
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._custom_ids: set[bytes] = set()  # as digests

    @property
    def is_over(self) -> bool:
        """Whether the maximum number of lines or errors is reached."""
        return self.num_lines > MAX_LINES or len(self.errors) >= MAX_ERRORS

    def check(self, number: int, line: bytes | None) -> None:
        """Check the next line; None: it is too long."""
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            self._note(None, "too_many_requests", f"there are more than {MAX_LINES} requests")
        elif line is None:
            limit = self._max_body_bytes + _LINE_OVERHEAD
            problem = f"the line is longer than {limit} bytes (the server's max_body_bytes and some more)"
            self._note(number, "line_too_long", problem)
        else:
            self._check_text(number, line)

    def finish(self) -> None:
        """Note whether there are any lines at all."""
        if not self.num_lines:
            self._note(None, "empty_file", "the file has no requests")

    def _check_text(self, number: int, line: bytes) -> None:
        try:
            request = _decode_line(line)
        except msgspec.ValidationError as error:
            found = _PARAM.search(str(error))
            self._note(number, "invalid_request", str(error), found and found[1])
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._note(number, "invalid_json_line", f"the line is not valid JSON: {error}")
            return
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        if request.url != self._endpoint:
            problem = f"the url is {request.url[:128]!r}; it must be the batch's endpoint {self._endpoint!r}"
            self._note(number, "mismatched_endpoint", problem, "url")
        elif not bytes(request.body).startswith(b"{"):
            self._note(number, "invalid_request", "the body must be an object", "body")
        elif digest in self._custom_ids:
            problem = f"the custom_id {request.custom_id[:128]!r} occurs before"
            self._note(number, "duplicate_custom_id", problem, "custom_id")
        self._custom_ids.add(digest)

    def _note(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(BatchError(code=code, message=message, line=line, param=param))


def parsed_line(line: bytes) -> InputLine:
    """Return a line that has been checked."""
    return _decode_line(line)
