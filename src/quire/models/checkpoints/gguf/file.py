"""Reading GGUF files: metadata and tensor offsets.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf`
package reads the same, but makes an array of every string of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from quire.errors import ModelError
from quire.models.checkpoints.gguf.architectures import architecture_of
from quire.models.checkpoints.gguf.location import parts_of
from quire.models.checkpoints.quantized.description import IN_MXFP4, StoredQuantization

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
_LENGTH = struct.Struct("<Q")  # of a text, in bytes
_MAX_DIMS = 4
# The largest vocabularies have about 300,000 tokens and up to twice as many merges, which take some 15 MB.
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_HEADER_BYTES = 256 << 20
# Of all arrays together. Each value is a Python object, and a text or an array within another costs
# microseconds of reading; llama.cpp reads no arrays within others, and so no published file has them.
_MAX_ARRAY_VALUES = {"numbers": 1 << 23, "texts": 1 << 21, "arrays": 1 << 12}
_MAX_ARRAY_DEPTH = 4
_MAX_ALIGNMENT = 1 << 16  # bytes
_ALIGNMENT = 32  # bytes, where a file does not say
# What reading damaged bytes can raise.
_FAULTS = (OSError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError, struct.error)


BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},
    **{
        16: (256, 66),
        17: (256, 74),
        18: (256, 98),
        20: (32, 18),
        21: (256, 110),
        22: (256, 82),
        23: (256, 136),
    },
    **{30: (1, 2), 39: (32, 17)},
}
"""(numbers, bytes) of a block of the types of tensors that Quire reads, by ggml's number."""

_TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), 6)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), 16)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), 24)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


STORED_AS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), StoredQuantization("int4", 32)),
    **dict.fromkeys(("Q2_K", "Q3_K"), StoredQuantization("int4", 16)),
    **dict.fromkeys(
        ("Q5_1", "Q5_K", "Q8_0", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        StoredQuantization("grouped_int8", 32),
    ),
    "MXFP4": IN_MXFP4,
    "Q5_0": StoredQuantization("int6", 32),
    "Q6_K": StoredQuantization("int6", 16),
    **dict.fromkeys(("IQ2_XS", "IQ2_S"), StoredQuantization("grouped_int8", 16)),
}
"""What matrices of the quantized types become in memory, by ggml's names."""


def type_name(kind: int) -> str:
    """Return the name of a type of tensors by ggml's number."""
    return _TYPE_NAMES.get(kind, f"number {kind}, which has no name")


@dataclasses.dataclass(slots=True, frozen=True)
class TensorInfo:
    """Place of a tensor in `data`: `shape` in torch's order, `start` in bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int
    data: mmap.mmap


class Texts(Sequence[str]):
    """An array of texts, each behind its length. Decoded when it is read: few readers need a vocabulary.

    Args:
        data: the file.
        start: where the array begins, in bytes; it is within the file.
        count: of texts.
    """

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.decoded[index]

    @functools.cached_property
    def decoded(self) -> list[str]:
        """The texts."""
        texts, place = [], self._start
        for _ in range(self._count):
            (length,) = _LENGTH.unpack_from(self._data, place)
            start = place + _LENGTH.size
            place = start + length
            texts.append(self._data[start:place].decode("utf-8", "replace"))
        return texts


def num_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor of a type that Quire reads."""
    block_size, block_bytes = BLOCKS[info.kind]
    return math.prod(info.shape) // block_size * block_bytes


def read_gguf(path: Path) -> GGUFFile:
    """Return the GGUF file at `path`, with the tensors of all parts if it is split.

    Raises:
        ModelError: a file cannot be read, the parts are not those of one model, or Quire does not read its
            architecture or the type of a tensor.
    """
    file, *others = (GGUFFile(part) for part in parts_of(path))
    for number, other in enumerate(others, start=1):
        if other.metadata.get("split.no") != number:
            raise ModelError(
                f"{other.path} says split.no {other.metadata.get('split.no')!r:.50}, not {number}"
            )
        twice = file.tensors.keys() & other.tensors.keys()
        if twice:
            raise ModelError(
                f"{other.path} holds {min(twice):.1000}, which another part of the model holds too"
            )
        file.tensors |= other.tensors
    promised = file.metadata.get("split.tensors.count", len(file.tensors))
    if promised != len(file.tensors):
        raise ModelError(
            f"{path} promises {promised!r:.50} tensors; its {len(others) + 1} parts hold {len(file.tensors)}"
        )
    architecture_of(file.metadata, path)
    for name, info in file.tensors.items():
        _check_type(f"{name:.1000} in {path}", info)
    return file


def _check_type(where: str, info: TensorInfo) -> None:
    if info.kind not in BLOCKS:
        known = ", ".join(map(type_name, BLOCKS))
        raise ModelError(f"{where} is of the ggml type {type_name(info.kind)}; Quire reads {known}")
    block_size, _ = BLOCKS[info.kind]
    if info.shape and info.shape[-1] % block_size:
        raise ModelError(
            f"{where} has rows of {info.shape[-1]} numbers; {type_name(info.kind)} has blocks of {block_size}"
        )


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
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private pages
            self._place, self._limit = 0, min(len(self.data), _MAX_HEADER_BYTES)
            self._num_values = dict.fromkeys(_MAX_ARRAY_VALUES, 0)  # values in arrays so far
            self._read()
        except _FAULTS as error:
            # the names that it quotes may be as long as the file says
            raise ModelError(f"{path} cannot be read as a GGUF file: {error!s:.1000}") from error

    def _read(self) -> None:
        if self.data[:4] != _MAGIC:
            raise ValueError(f"it begins with {self.data[:4]!r}, not {_MAGIC!r}")
        self._place = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3, little-endian, are supported")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise ValueError(
                f"it promises {num_tensors} tensors and {num_entries} entries; at most {_MAX_TENSORS} and "
                f"{_MAX_ENTRIES} are read"
            )
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = self._data_start(infos)
        self.tensors = {
            name: dataclasses.replace(info, start=data_start + info.start) for name, info in infos
        }
        if len(self.tensors) < num_tensors:
            raise ValueError("two of its tensors have the same name")
        self._check_places()

    def _data_start(self, infos: list[tuple[str, TensorInfo]]) -> int:
        """Return where the tensors' data begins, in bytes."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
            raise ValueError(
                f"general.alignment is {alignment!r:.50}; it must be a multiple of 8 up to {_MAX_ALIGNMENT}"
            )
        for name, info in infos:
            if info.start % alignment:
                raise ValueError(f"tensor {name} begins at byte {info.start}, not a multiple of {alignment}")
        return -(-self._place // alignment) * alignment

    def _check_places(self) -> None:
        """Raise ValueError unless all tensors of known types are within the file, in order."""
        end, last = 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise ValueError(
                    f"tensor {name} begins at byte {info.start}, within {last}, which ends at {end}"
                )
            if info.kind in BLOCKS:
                end, last = info.start + num_bytes(info), name
            if max(end, info.start) > len(self.data):
                raise ValueError(f"it ends within {name}; it was cut short")

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name = self._string()
        num_dims = self._number("<I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions; at most {_MAX_DIMS} are possible")
        shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
        return name, TensorInfo(shape, self._number("<I"), self._number("<Q"), self.data)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        inner, count = self._number("<I"), self._number("<Q")
        values = "texts" if inner == _STRING else "arrays" if inner == _ARRAY else "numbers"
        self._num_values[values] += count
        if self._num_values[values] > _MAX_ARRAY_VALUES[values] or depth == _MAX_ARRAY_DEPTH:
            raise ValueError(
                f"an array at byte {self._place} has {count} {values}; {_MAX_ARRAY_VALUES[values]} are read "
                f"in all, and {_MAX_ARRAY_DEPTH} arrays within each other"
            )
        if inner == _STRING:
            return self._texts(count)
        if inner == _ARRAY:
            return [self._value(_ARRAY, depth + 1) for _ in range(count)]
        return self._numbers(inner, count).tolist()

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise ValueError(f"it holds a value of the unknown kind {kind}")
        numbers = np.frombuffer(
            self.data[self._place : self._place + count * np.dtype(_SCALARS[kind]).itemsize],
            dtype=_SCALARS[kind],
            count=count,
        )
        self._advance(numbers.nbytes)
        return numbers

    def _number(self, form: str) -> int:
        start = self._place
        self._advance(struct.calcsize(form))
        (number,) = struct.unpack_from(form, self.data, start)
        return int(number)

    def _advance(self, num_bytes: int) -> None:
        if num_bytes > self._limit - self._place:
            raise ValueError(
                f"{num_bytes} bytes at byte {self._place} go beyond {self._limit}, where it must end"
            )
        self._place += num_bytes

    def _string(self) -> str:
        length = self._number("<Q")
        start = self._place
        self._advance(length)
        return self.data[start : self._place].decode("utf-8", "replace")

    def _texts(self, count: int) -> Texts:
        """Pass over texts; a call for each would take as long as the weights of a small model."""
        data, place, length_at = self.data, self._place, _LENGTH.unpack_from
        last = self._limit - _LENGTH.size
        for _ in range(count):
            if place > last:
                break
            (length,) = length_at(data, place)
            place += _LENGTH.size + length
        else:
            if place <= self._limit:
                start, self._place = self._place, place
                return Texts(data, start, count)
        raise ValueError(f"{count} texts at byte {self._place} go beyond {self._limit}, where it must end")

    def entry(self, key: str, kind: type) -> Any:
        """Return a value of the metadata, None if it is missing.

        Raises:
            ModelError: its type is not `kind`.
        """
        value = self.metadata.get(key)
        if isinstance(value, Texts):
            value = value.decoded
        if value is not None and type(value) is not kind:
            raise ModelError(f"{self.path}: {key} is of the type {type(value).__name__}, not {kind.__name__}")
        return value

    def entries(self, key: str, kind: type) -> list[Any]:
        """Return a list in the metadata, an empty one if it is missing.

        Raises:
            ModelError: it is not a list of `kind`.
        """
        values: list[Any] = self.entry(key, list) or []
        if not all(type(value) is kind for value in values):
            raise ModelError(f"{self.path}: {key} has values of another type than {kind.__name__}")
        return values
