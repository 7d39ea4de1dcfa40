"""Scans of whole rows of logits by the native kernels (native/src/sampling.h)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from quire.kernels.arrays import Float32Array, Float64Array
from quire.kernels.cpu import _native
from quire.kernels.sampling.row_scans import Head, RowScans
from quire.step import Int64Array


class NativeScans(RowScans):
    """In C++.

    Raises:
        ValueError: an array is of another type or shape than the interface has.
        IndexError: a token id is not in the vocabulary.
    """

    @override
    def largest(
        self, logits: Float32Array, rows: Int64Array | None = None
    ) -> tuple[Int64Array, Float32Array]:
        where = _where(logits, rows)
        token_ids = np.empty(where[3], dtype=np.int64)
        maxima = np.empty(where[3], dtype=np.float32)
        _native.largest(*where, _address(token_ids), _address(maxima))
        return token_ids, maxima

    @override
    def likeliest(self, logits: Float32Array, rows: Int64Array | None = None) -> Head:
        where = _where(logits, rows)
        num_rows = where[3]
        values = np.empty((num_rows, _native.MAX_HEAD_TOKENS), dtype=np.float32)
        token_ids = np.empty(values.shape, dtype=np.int64)
        count = np.empty(num_rows, dtype=np.int64)
        complete = np.empty(num_rows, dtype=np.bool_)
        _native.likeliest(*where, _address(values), _address(token_ids), _address(count), _address(complete))
        width = max(1, count.max(initial=0))
        return Head(values[:, :width], token_ids[:, :width], count, complete)

    @override
    def sum_exp(
        self,
        logits: Float32Array,
        maxima: Float32Array,
        temperature: Float64Array,
        rows: Int64Array | None = None,
    ) -> Float64Array:
        where = _where(logits, rows)
        maxima = _numbers("maxima", maxima, np.float32, where[3])
        temperature = _numbers("temperature", temperature, np.float64, where[3])
        sums = np.empty(where[3])
        _native.sum_exp(*where, _address(maxima), _address(temperature), _address(sums))
        return sums

    @override
    def ranks(
        self, logits: Float32Array, token_ids: Int64Array, rows: Int64Array | None = None
    ) -> Int64Array:
        where = _where(logits, rows)
        token_ids = _numbers("token_ids", token_ids, np.int64, where[3])
        if _is_outside(token_ids, where[4]):
            raise IndexError(f"token ids are {token_ids}; they must be from 0 to {where[4] - 1}")
        places = np.empty(where[3], dtype=np.int64)
        _native.ranks(*where, _address(token_ids), _address(places))
        return places


def _where(logits: Float32Array, rows: Int64Array | None) -> tuple[int, int, int, int, int]:
    """Return the address and row stride of the logits, the address and number of rows, and the columns.

    `rows` must outlive the call, which the caller's own reference sees to.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size < 1:
        raise ValueError(f"logits are {list(logits.shape)}; there must be at least 1 token")
    row_stride, stride = logits.strides
    if logits.dtype != np.float32 or (stride != 4 and vocab_size > 1) or row_stride % 4:
        raise ValueError(
            f"logits are {logits.dtype} with strides {logits.strides} in bytes; they must be float32, and a "
            "row's numbers adjacent"
        )
    first = _address(logits[0]) if num_rows else 0
    if rows is None:
        return first, row_stride // 4, 0, num_rows, vocab_size
    rows = _numbers("rows", rows, np.int64, len(rows))
    if _is_outside(rows, num_rows):
        raise IndexError(f"rows are from {rows.min()} to {rows.max()}; logits have {num_rows} rows")
    return first, row_stride // 4, _address(rows), len(rows), vocab_size


def _numbers(name: str, array: npt.NDArray[Any], dtype: type[Any], length: int) -> npt.NDArray[Any]:
    if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape} with strides {array.strides} in bytes; it must be "
            f"{np.dtype(dtype)} [{length}] and contiguous"
        )
    return array


def _is_outside(numbers: Int64Array, end: int) -> bool:
    return bool(np.count_nonzero(numbers.view(np.uint64) >= end))  # negative ones are the largest


def _address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous, writable array, 0 of an empty one; `array.ctypes` takes longer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0
