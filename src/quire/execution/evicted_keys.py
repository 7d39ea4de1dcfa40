"""Keys and values in the cache, as cache eviction reads and changes them."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.key_scores import Int64Array
from quire.kernels.kv_layer import KVLayer, keys_of, pages_of
from quire.kv.eviction.scores import WeightArray
from quire.models.config import ModelConfig
from quire.models.rotary import RotaryTable


def cached_keys(kv: KVLayer, block_ids: Int64Array) -> WeightArray:
    """Return the keys in some blocks of a layer, [kv_heads, blocks * block_size, head_dim]."""
    keys: WeightArray = keys_of(kv, torch.from_numpy(block_ids)).numpy()
    return keys


def copy_blocks(kv: KVLayer, sources: Int64Array, targets: Int64Array) -> None:
    """Copy a layer's part of blocks `sources` [N] to `targets` [N], none of which is a source."""
    source, target = torch.from_numpy(sources), torch.from_numpy(targets)
    for pages in (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales):
        if pages is not None:
            _write_pages(pages, target, pages_of(pages, source))


def _write_pages(pages: torch.Tensor, block_ids: torch.Tensor, new: torch.Tensor) -> None:
    """Overwrite pages of all, [kv_heads, blocks, ...], by `new`, [kv_heads, N, ...]."""
    pages.transpose(0, 1).index_copy_(0, block_ids, new.transpose(0, 1))


class KeyRotation:
    """Turns rotated keys back to earlier positions.

    Args:
        model: with one rotary embedding that all layers share and that rotates whole heads, and keys that
            are not quantized.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._table = RotaryTable(model.ropes[model.layer_ropes[0]], model.max_model_len)

    def turn_back(self, kv: KVLayer, block_ids: Int64Array, distances: Int64Array) -> None:
        """Turn the keys in blocks [N] of a layer back by `distances` positions, [N].

        A key rotated by position p becomes what it would be at p - distance, but for rounding.
        """
        turned = np.flatnonzero(distances)
        if not turned.size:
            return
        index = torch.from_numpy(block_ids[turned])
        back = distances[turned]
        cos, sin = self._table.rows(torch.from_numpy(back), last=int(back.max()))
        cos, sin = cos[:, None, :], sin[:, None, :]  # [N, 1, head_dim / 2]
        first, second = pages_of(kv.key_pages, index).float().chunk(2, dim=-1)
        keys = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        _write_pages(kv.key_pages, index, keys.to(kv.key_pages.dtype))
