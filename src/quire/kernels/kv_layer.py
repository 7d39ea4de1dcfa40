"""One layer's part of the paged KV cache, as the kernels see it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from quire.kernels.page_quantizers import PageQuantizer


class KVLayer(Protocol):
    """Keys and values of one layer; `quire.kv.PagedAttentionCacheView` is one.

    The features of a head are adjacent; all other strides are free. Places that were never written may hold
    anything.
    """

    key_pages: torch.Tensor
    """[kv_heads, num_pages, page_size, head_dim], or what the quantizer makes of head_dim features."""
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None
    """[kv_heads, num_pages, page_size], or more dimensions; of a quantizer that has scales."""
    value_scales: torch.Tensor | None
    quantizer: PageQuantizer | None
    """Makes the pages' numbers; None: keys and values are rounded to the pages' type."""
    handles: dict[str, Any]
    """What the kernels keep of this layer, by their name."""
