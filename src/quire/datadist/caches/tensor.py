"""Tensors and their descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.datadist.argument_checks import OFFSET, ArgumentChecks
from quire.datadist.enums import DataType

_TORCH_DTYPES: dict[DataType, torch.dtype] = {one: getattr(torch, one.torch_name) for one in DataType}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _TORCH_DTYPES.items()}


def torch_dtype(data_type: DataType) -> torch.dtype:
    """Return torch's data type."""
    return _TORCH_DTYPES[data_type]


class TensorDesc:
    """Element type and shape of a tensor.

    Args:
        dtype: type of the elements.
        shape: list or tuple of dimensions >= 0.
    """

    def __init__(self, dtype: DataType, shape: list[int] | tuple[int, ...]) -> None:
        with ArgumentChecks() as check:
            check.instance("dtype", dtype, DataType)
            self._dtype = dtype
            self._shape = check.integers("shape", shape, OFFSET)

    @property
    def dtype(self) -> DataType:
        """Type of the elements."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dimensions, as a new list."""
        return list(self._shape)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorDesc):
            return NotImplemented
        return (self._dtype, self._shape) == (other._dtype, other._shape)

    @override
    def __hash__(self) -> int:
        return hash((self._dtype, *self._shape))

    @override
    def __repr__(self) -> str:
        return f"TensorDesc({self._dtype.name}, {self._shape})"


class Tensor:
    """A tensor with its description: a copy of an array, or a live view of a cache.

    Args:
        data: an array or tensor in any memory layout; copied.
        tensor_desc: expected description of `data`; None: derived from it.

    Raises:
        TypeError: `data` is not an array, or `DataType` does not have its element type.
        RuntimeError: shape or dtype is not as described.
    """

    def __init__(
        self, data: npt.NDArray[Any] | torch.Tensor | Tensor, tensor_desc: TensorDesc | None = None
    ) -> None:
        with ArgumentChecks() as check:
            check.instance("data", data, np.ndarray, torch.Tensor, Tensor)
            check.instance("tensor_desc", tensor_desc, TensorDesc, type(None))
        values = _snapshot(data)
        if tensor_desc is not None and tensor_desc != _describe(values):
            raise RuntimeError(f"the data is {_describe(values)}, but is described as {tensor_desc}")
        self._values = values
        self._desc = _describe(values)

    @classmethod
    def _view(cls, values: torch.Tensor) -> Tensor:
        """Return a tensor that shares the memory of `values`."""
        tensor = cls.__new__(cls)
        tensor._values = values
        tensor._desc = _describe(values)
        return tensor

    @property
    def tensor_desc(self) -> TensorDesc:
        """Element type and shape."""
        return self._desc

    def torch(self) -> torch.Tensor:
        """Return the values without a copy, on the device where they are."""
        return self._values

    def numpy(self, copy: bool = False) -> npt.NDArray[Any]:
        """Return the values as an array of the full shape.

        Without `copy`, the memory is shared where it is the host's and numpy has the type; bfloat16 becomes
        float32, which is exact.
        """
        with ArgumentChecks() as check:
            check.instance("copy", copy, bool)
        values = self._values.float() if self._values.dtype == torch.bfloat16 else self._values
        is_shared = values is self._values and values.device.type == "cpu"
        array: npt.NDArray[Any] = values.cpu().numpy()
        return array.copy() if copy and is_shared else array

    @override
    def __repr__(self) -> str:
        return f"Tensor({self._desc})"


def view_of(values: torch.Tensor) -> Tensor:
    """Return a tensor that shares the memory of `values`, which a cache owns."""
    return Tensor._view(values)


def _describe(values: torch.Tensor) -> TensorDesc:
    return TensorDesc(_DATA_TYPES[values.dtype], list(values.shape))


def _snapshot(data: npt.NDArray[Any] | torch.Tensor | Tensor) -> torch.Tensor:
    if isinstance(data, Tensor):
        data = data.torch()
    if isinstance(data, torch.Tensor):
        if data.dtype not in _DATA_TYPES:
            raise TypeError(f"data has elements of type {data.dtype}, which DataType does not list")
        return data.detach().clone(memory_format=torch.contiguous_format)
    native = data.dtype.newbyteorder("=")
    if native.name not in {one.torch_name for one in DataType}:
        raise TypeError(f"data has elements of type {data.dtype}, which DataType does not list")
    return torch.from_numpy(np.array(data, dtype=native, order="C", copy=True))
