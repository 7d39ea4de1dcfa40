"""The scans of logits in Triton behind the interface of those on the host: the same tests fit both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.kernels.arrays import Float32Array, Float64Array
from quire.kernels.sampling.row_scans import Head, RowScans
from quire.kernels.triton.device import kernel_device
from quire.kernels.triton.sampling import row_scans
from quire.step import Int64Array


class TritonSampling(RowScans):
    """Computes where the kernels do, and waits for the results.

    Raises:
        ValueError: an array is of another type or shape than the interface has.
        IndexError: a row or a token id is out of range.
    """

    @override
    def largest(
        self, logits: Float32Array, rows: Int64Array | None = None
    ) -> tuple[Int64Array, Float32Array]:
        token_ids, maxima = row_scans.largest(*_where(logits, rows))
        return token_ids.cpu().numpy(), maxima.cpu().numpy()

    @override
    def likeliest(self, logits: Float32Array, rows: Int64Array | None = None) -> Head:
        values, token_ids, count, complete = (
            part.cpu().numpy() for part in row_scans.likeliest(*_where(logits, rows))
        )
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
        on_device, chosen = _where(logits, rows)
        length = len(logits if rows is None else rows)
        of_rows = (
            _numbers("maxima", maxima, np.float32, length),
            _numbers("temperature", temperature, np.float64, length),
        )
        sums: Float64Array = row_scans.sum_exp(on_device, *of_rows, chosen).cpu().numpy()
        return sums

    @override
    def ranks(
        self, logits: Float32Array, token_ids: Int64Array, rows: Int64Array | None = None
    ) -> Int64Array:
        on_device, chosen = _where(logits, rows)
        tokens = _numbers("token_ids", token_ids, np.int64, len(logits if rows is None else rows))
        _check_range("token ids", token_ids, logits.shape[1])
        places: Int64Array = row_scans.ranks(on_device, tokens, chosen).cpu().numpy()
        return places


def _where(logits: Float32Array, rows: Int64Array | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits and rows on the device."""
    num_rows, vocab_size = logits.shape
    row_stride, stride = logits.strides
    if logits.dtype != np.float32 or vocab_size < 1 or (stride != 4 and vocab_size > 1) or row_stride % 4:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)} with strides {logits.strides} in bytes; they "
            "must be float32, have at least 1 token, and a row's numbers adjacent"
        )
    on_device = torch.from_numpy(logits).to(kernel_device())
    if rows is None:
        return on_device, None
    _check_range("rows", rows, num_rows)
    return on_device, _numbers("rows", rows, np.int64, len(rows))


def _numbers(name: str, array: npt.NDArray[Any], dtype: type[Any], length: int) -> torch.Tensor:
    if array.dtype != dtype or array.shape != (length,):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be {np.dtype(dtype)} [{length}]")
    return torch.from_numpy(np.ascontiguousarray(array)).to(kernel_device())


def _check_range(name: str, numbers: Int64Array, length: int) -> None:
    if ((numbers < 0) | (numbers >= length)).any():
        raise IndexError(f"{name} are {numbers}; they must be from 0 to {length - 1}")
