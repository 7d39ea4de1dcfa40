"""The two output files of a batch, the only record of which requests are done.

A server that was killed resumes where they end: an incomplete last line is cut off, and its request is served
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.server.batches.answers import ResultLine

_decode_result = msgspec.json.Decoder(ResultLine).decode


class ResultFile:
    """A file of results; everything blocks.

    Args:
        path: path of the file, created if missing.
        id_prefix: prefix of the ids of its lines, followed by the request's line number in the input.
    """

    def __init__(self, path: Path, id_prefix: str) -> None:
        self.path = path
        self.num_bytes = 0
        self._id_prefix = id_prefix
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def resume(self) -> Iterator[int]:
        """Yield the numbers of finished requests, and truncate the file after their lines."""
        with os.fdopen(os.dup(self._file), "rb") as reader:
            for number, size in self._whole_lines(reader):
                self.num_bytes += size
                yield number
        os.ftruncate(self._file, self.num_bytes)

    def append(self, line: bytes) -> None:
        """Write a line, completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._file, memoryview(line)[written:], self.num_bytes + written)
        except OSError:
            os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(line)

    def sync(self) -> None:
        """Sync what was written to disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; one without results is removed."""
        os.close(self._file)
        if not self.num_bytes:
            self.path.unlink(missing_ok=True)

    def _whole_lines(self, reader: BinaryIO) -> Iterator[tuple[int, int]]:
        reader.seek(0)
        for line in reader:
            number = self._number_of(line)
            if number is None:
                return
            yield number, len(line)

    def _number_of(self, line: bytes) -> int | None:
        """Return the request number of a result line; None: the line is incomplete."""
        if not line.endswith(b"\n"):
            return None
        try:
            result = _decode_result(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        prefix, _, number = result.id.rpartition("_")
        return int(number) if prefix == self._id_prefix and number.isdecimal() else None


class Results:
    """The results of a batch; everything blocks.

    Args:
        output: file for requests that succeeded.
        errors: file for those that did not.
    """

    def __init__(self, output: ResultFile, errors: ResultFile) -> None:
        self.output = output
        self.errors = errors
        self.done: set[int] = set()
        self.num_completed = 0

    @property
    def files(self) -> list[ResultFile]:
        """The files that are not empty."""
        return [file for file in (self.output, self.errors) if file.num_bytes]

    @property
    def num_bytes(self) -> int:
        """Size of both files together."""
        return self.output.num_bytes + self.errors.num_bytes

    def resume(self) -> None:
        """Read which requests are done."""
        self.done.update(self.output.resume())
        self.num_completed = len(self.done)
        self.done.update(self.errors.resume())

    def append(self, number: int, result: ResultLine, encoded: bytes) -> None:
        """Write the result of a request.

        Raises:
            OSError: it cannot be written; the file is unchanged.
        """
        (self.output if result.is_success else self.errors).append(encoded)
        self.done.add(number)
        self.num_completed += result.is_success

    def sync(self) -> None:
        """Sync what was written to disk."""
        self.output.sync()
        self.errors.sync()

    def close(self) -> None:
        """Close the files."""
        self.output.close()
        self.errors.close()
