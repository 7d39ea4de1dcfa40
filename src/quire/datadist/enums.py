"""Cluster roles, memory placement, and data types."""

from __future__ import annotations

from enum import IntEnum


class LLMRole(IntEnum):
    """PROMPT is the prefill side, which serves; DECODER is the decode side, which links and pulls."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(IntEnum):
    """Host memory, or memory of the engine's device."""

    HOST = 0
    DEVICE = 1


class DataType(IntEnum):
    """Element types of tensors, numbered as in `aclDataType`."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_BF16 = 27

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _TYPES[self][1]

    @property
    def torch_name(self) -> str:
        """Name in torch, and in numpy unless it is "bfloat16", which numpy does not have."""
        return _TYPES[self][0]


_TYPES = {
    DataType.DT_FLOAT: ("float32", 4),
    DataType.DT_FLOAT16: ("float16", 2),
    DataType.DT_INT8: ("int8", 1),
    DataType.DT_INT32: ("int32", 4),
    DataType.DT_UINT8: ("uint8", 1),
    DataType.DT_INT16: ("int16", 2),
    DataType.DT_UINT16: ("uint16", 2),
    DataType.DT_UINT32: ("uint32", 4),
    DataType.DT_INT64: ("int64", 8),
    DataType.DT_UINT64: ("uint64", 8),
    DataType.DT_DOUBLE: ("float64", 8),
    DataType.DT_BOOL: ("bool", 1),
    DataType.DT_BF16: ("bfloat16", 2),
}
"""Name in torch, and bytes of an element."""
