"""The description of a cache: its tensors and their shape."""

from __future__ import annotations

import dataclasses
import math

from typing_extensions import override

from quire.datadist.argument_checks import DIMENSION, U32, ArgumentChecks, Bounds
from quire.datadist.enums import DataType, Placement


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class CacheDesc:
    """Tensors of one shape and dtype, normally K and V of each layer.

    Dimension 0 counts slots (contiguous caches) or blocks (blocks caches).

    Args:
        num_tensors: >= 1.
        shape: shape of each tensor; dimensions >= 1.
        data_type: data type of the elements.
        placement: device or host memory.
        batch_dim_index: dimension that counts slots; only 0 can be allocated.
        seq_len_dim_index: dimension that counts tokens; -1: unset.
        kv_tensor_format: stored only.
    """

    num_tensors: int
    data_type: DataType
    placement: Placement
    batch_dim_index: int
    seq_len_dim_index: int
    kv_tensor_format: str | None
    _shape: list[int]

    def __init__(  # noqa: PLR0917 - the interface's order
        self,
        num_tensors: int,
        shape: tuple[int, ...] | list[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        with ArgumentChecks() as check:
            count = check.integer("num_tensors", num_tensors, Bounds(1, U32.greatest))
            dims = check.integers("shape", shape, DIMENSION)
            check.instance("data_type", data_type, DataType)
            check.instance("placement", placement, Placement)
            check.instance("kv_tensor_format", kv_tensor_format, str, type(None))
            check.require(bool(dims), "shape has no dimensions")
            last_dim = len(dims) - 1
            batch_dim = check.integer("batch_dim_index", batch_dim_index, Bounds(0, last_dim))
            seq_len_dim = check.integer("seq_len_dim_index", seq_len_dim_index, Bounds(-1, last_dim))
        values = (count, data_type, placement, batch_dim, seq_len_dim, kv_tensor_format, dims)
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def shape(self) -> list[int]:
        """Dimensions of each tensor, as a new list."""
        return list(self._shape)

    @property
    def batch_size(self) -> int:
        """Number of slots or blocks."""
        return self._shape[self.batch_dim_index]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self._shape) * self.data_type.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot or block of one tensor."""
        return self.tensor_bytes // self._shape[0]

    @override
    def __repr__(self) -> str:
        return f"CacheDesc({self.num_tensors}, {self._shape}, {self.data_type.name}, {self.placement.name})"
