"""One layer's part of the paged KV cache, as the kernels see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(slots=True, frozen=True)
class KVLayer:
    """Keys and values of one layer, each [num_blocks, kv_heads, block_size, head_dim].

    The features of a head are adjacent; all other strides are free. With scales the two are int8, and the
    number at a place is the int8 times its scale. Places that were never written may hold anything.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # [num_blocks, kv_heads, block_size] float32
    value_scales: torch.Tensor | None = None
    handles: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What the kernels keep of this layer, by their name."""
