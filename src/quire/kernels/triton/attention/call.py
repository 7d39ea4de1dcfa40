"""The arguments of one call of paged attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton.language as tl

from quire.kernels.attention.paged import Scores
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import TILE
from quire.kernels.triton.attention.layer import TritonLayer


@dataclasses.dataclass(slots=True, frozen=True)
class SelectedKeys:
    """The key blocks that the query blocks of a step see."""

    seen: torch.Tensor  # [Q, heads, key blocks] int32, 1: it does
    block_of_token: torch.Tensor  # [T] int32, which of the Q a token is in; -1: it sees all keys
    block_size: int  # tokens


@dataclasses.dataclass(slots=True, frozen=True)
class AttentionCall:
    """A layer's attention in one step."""

    query: torch.Tensor
    layer: TritonLayer
    tables: torch.Tensor  # [S, max_blocks] int32
    heads: HeadLayout
    how: Scores
    window: int  # that a token sees, in a two-sided batch on both sides together; 0: all
    distance_bias: torch.Tensor | None = None  # [heads, an odd number] float32, see `KernelSet`
    selected: SelectedKeys | None = None  # None: all keys are seen

    @property
    def is_float32(self) -> bool:
        """Whether products are of float32 numbers, for which there are no tensor cores."""
        return self.layer.product_type(self.query.dtype) is tl.float32

    @property
    def is_converted(self) -> bool:
        """Whether what is in the cache is of another type than products."""
        return self.layer.dtype is not self.query.dtype

    @property
    def seen_blocks(self) -> tuple[torch.Tensor | None, int, torch.Tensor | None]:
        """The key blocks that query blocks see, how many there are, and the query block of each token."""
        if self.selected is None:
            return None, 0, None
        return self.selected.seen, self.selected.seen.shape[2], self.selected.block_of_token

    @property
    def options(self) -> dict[str, Any]:
        """What kernels that read keys are compiled for."""
        return {
            "BLOCK_SIZE": self.layer.page_size,
            "SEEN_TILES": 1 if self.selected is None else self.selected.block_size // TILE,
            "PRODUCT_TYPE": self.layer.product_type(self.query.dtype),
            "HAS_SCALES": self.layer.has_scales,
            "HAS_SOFTCAP": self.how.softcap != 0.0,
            "HAS_WINDOW": self.window != 0,
            "HAS_SELECTION": self.selected is not None,
            "enable_fp_fusion": False,
        }
