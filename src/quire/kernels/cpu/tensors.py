"""How tensors are told to the native kernels: as an address and the number of a type."""

from __future__ import annotations

import torch

TYPE_NUMBERS = {  # DType in native/src/types.h
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 4,
}


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's first number, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
