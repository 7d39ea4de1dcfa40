"""Reading GGUF files: metadata, and where the tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf`
package reads the same, but makes an array of every string of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_ALIGNMENT = 32  # bytes, where a file does not say
# What reading damaged bytes can raise.
_FAULTS = (OSError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError, struct.error)


@dataclasses.dataclass(slots=True, frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` as torch has it, the last dimension adjacent; `start` in bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Args:
        path: the file.

    Raises:
        ModelError: it cannot be read, or is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # pages change in no file
            self._place = 0
            self._read()
        except _FAULTS as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error

    def _read(self) -> None:
        if self.data[:4] != _MAGIC:
            raise ValueError(f"it begins with {self.data[:4]!r}, not {_MAGIC!r}")
        self._place = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3, little-endian, are supported")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if alignment % 8 or any(info.start % alignment for _, info in infos):
            raise ValueError(f"its tensors do not begin at multiples of {alignment} bytes, and these of 8")
        data_start = -(-self._place // alignment) * alignment
        self.tensors = {
            name: dataclasses.replace(info, start=data_start + info.start) for name, info in infos
        }

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name = self._string()
        num_dims = self._number("<I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions; at most {_MAX_DIMS} are possible")
        shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
        return name, TensorInfo(shape, self._number("<I"), self._number("<Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        inner, count = self._number("<I"), self._number("<Q")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        if inner == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return self._numbers(inner, count).tolist()

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise ValueError(f"it holds a value of the unknown kind {kind}")
        numbers = np.frombuffer(
            self.data[self._place : self._place + count * np.dtype(_SCALARS[kind]).itemsize],
            dtype=_SCALARS[kind],
            count=count,
        )
        self._place += numbers.nbytes
        return numbers

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self.data, self._place)
        self._place += struct.calcsize(form)
        return int(number)

    def _string(self) -> str:
        length = self._number("<Q")
        start, self._place = self._place, self._place + length
        if self._place > len(self.data):
            raise ValueError(f"a text of {length} bytes at byte {start} goes beyond its end")
        return self.data[start : self._place].decode("utf-8", "replace")
