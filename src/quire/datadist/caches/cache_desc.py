"""What a cache consists of."""

from __future__ import annotations

import math

from typing_extensions import override

from quire.datadist.argument_checks import DIMENSION, U32, ArgumentChecks, Bounds
from quire.datadist.enums import DataType, Placement


class CacheDesc:
    """A number of tensors of one shape and dtype, normally K and V of each layer.

    Dimension 0 counts slots (contiguous caches) or blocks (blocks caches).

    Args:
        num_tensors: >= 1.
        shape: of each tensor; dimensions >= 1.
        data_type: of the elements.
        placement: memory of the device, or of the host.
        batch_dim_index: dimension that counts slots; only 0 can be allocated.
        seq_len_dim_index: dimension that counts tokens; -1: unset.
        kv_tensor_format: stored only.
    """

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
            self._num_tensors = check.integer("num_tensors", num_tensors, Bounds(1, U32.greatest))
            self._shape = check.integers("shape", shape, DIMENSION)
            check.instance("data_type", data_type, DataType)
            check.instance("placement", placement, Placement)
            check.instance("kv_tensor_format", kv_tensor_format, str, type(None))
            check.require(bool(self._shape), "shape has no dimensions")
            last_dim = len(self._shape) - 1
            self._batch_dim_index = check.integer("batch_dim_index", batch_dim_index, Bounds(0, last_dim))
            self._seq_len_dim_index = check.integer(
                "seq_len_dim_index", seq_len_dim_index, Bounds(-1, last_dim)
            )
        self._data_type = data_type
        self._placement = placement
        self._kv_tensor_format = kv_tensor_format

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> list[int]:
        """Dimensions of each tensor, as a list of the caller's own."""
        return list(self._shape)

    @property
    def data_type(self) -> DataType:
        """Type of the elements."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Where the memory is."""
        return self._placement

    @property
    def batch_dim_index(self) -> int:
        """Dimension that counts slots."""
        return self._batch_dim_index

    @property
    def seq_len_dim_index(self) -> int:
        """Dimension that counts tokens, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """What the caller has stored."""
        return self._kv_tensor_format

    @property
    def batch_size(self) -> int:
        """Number of slots or blocks."""
        return self._shape[self._batch_dim_index]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self._shape) * self._data_type.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot or block of one tensor."""
        return self.tensor_bytes // self._shape[0]

    @override
    def __repr__(self) -> str:
        return (
            f"CacheDesc({self._num_tensors}, {self._shape}, {self._data_type.name}, {self._placement.name})"
        )
