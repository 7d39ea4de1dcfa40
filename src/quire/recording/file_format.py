"""The file format of recordings: every call with its answers and results, as framed msgpack.

After `MAGIC` come frames: 4 bytes of length, little-endian, then msgpack. The first is a `Header`, all others
are `Frame`s. A file may end in the middle of a frame, if the engine was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.config import SchedulerConfig
from quire.errors import QuireError
from quire.kv.blocks.checkpoints import StateSlots
from quire.recording.calls import Call
from quire.recording.compilations import Compiled
from quire.recording.recorded_context import Answer

T = TypeVar("T")

MAGIC = b"quire recording\n"
VERSION = 6
LENGTH_BYTES = 4


class RecordingError(QuireError):
    """A file is not a recording, or not one that this version reads."""


class Header(msgspec.Struct):
    """How the scheduler was built; `vocab_size` is None without grammars.

    `windows` are the further cache groups: window, number of blocks, and whether their memory is reserved.
    `states` are those of recurrent layers.
    """

    version: int
    scheduler_cls: str
    config: SchedulerConfig
    num_blocks: int
    max_model_len: int
    vocab_size: int | None
    has_connector: bool
    has_reserved_blocks: bool
    windows: list[tuple[int, int, bool]]
    answers: list[Answer]
    states: StateSlots | None = None


class _Version(msgspec.Struct):
    """What the headers of all versions have."""

    version: int


class Frame(msgspec.Struct, array_like=True):
    """One call: when it began and ended (seconds on the scheduler's clock), and what came of it.

    `compiled` came to the scheduler just before the call. `result` is msgpack of what the call's docstring
    says; `error` is what it raised, empty if nothing.
    """

    call: Call
    start: float
    end: float
    compiled: list[Compiled]
    answers: list[Answer]
    result: msgspec.Raw
    error: str = ""


WrittenFrame = tuple[msgspec.Raw | None, float, float, list[Compiled], list[Answer], msgspec.Raw | None, str]
"""The fields of a `Frame`, with the call as it was before it was made."""


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def _decode_array(kind: type, value: Any) -> object:
    if value is None:
        return None
    dtype, shape, content = value
    return np.frombuffer(content, dtype=dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def raw(value: object) -> msgspec.Raw:
    """Return a call's result as it is in a frame."""
    return msgspec.Raw(encode(value))


NOTHING = raw(None)


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Return what `encode` has encoded, a value of type `kind`; arrays are read-only.

    Raises:
        RecordingError: `data` is no such value.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"a recorded {kind.__name__} is invalid: {error}") from error


def _framed(item: Header | WrittenFrame) -> bytes:
    data = encode(item)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class RecordingWriter:
    """Writes a recording, without a buffer of its own.

    Raises:
        OSError: the file cannot be written.
        TypeError: the header holds an object that is no plain data.
    """

    def __init__(self, path: Path, header: Header) -> None:
        first = _framed(header)
        self._file = path.open("wb")
        self._file.write(MAGIC + first)
        self._file.flush()

    def write(self, frame: WrittenFrame) -> None:
        """Append one frame."""
        self._file.write(_framed(frame))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Recording:
    """A recording to read: `header`, and the frames by iterating.

    Args:
        path: path of the file.

    Raises:
        RecordingError: it is not a recording, or of another version.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_truncated = False  # known when all frames have been read
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{path} is not a recording of Quire's scheduler")
        frames = self._frames()
        first = next(frames, None)
        if first is None:
            raise RecordingError(f"{path} ends before its header")
        try:
            version = decode(first, _Version).version
            if version != VERSION:
                raise RecordingError(f"it is of version {version}; this version of Quire reads {VERSION}")
            self.header = decode(first, Header)
        except RecordingError as error:
            raise RecordingError(f"the header of {path} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[Frame]:
        frames = self._frames()
        next(frames)
        for number, data in enumerate(frames):
            try:
                yield decode(data, Frame)
            except RecordingError as error:
                raise RecordingError(f"call {number} in {self.path} cannot be read: {error}") from error

    def _frames(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(len(MAGIC))
            while prefix := file.read(LENGTH_BYTES):
                length = int.from_bytes(prefix, "little")
                data = file.read(length)
                if len(prefix) < LENGTH_BYTES or len(data) < length:
                    self.is_truncated = True
                    return
                yield data
