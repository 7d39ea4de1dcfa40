"""Keys and values in the cache, as cache eviction reads and changes them, where the cache is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quire.kernels.attention.kv_layer import KVLayer, pages_of, vectors_in
from quire.kernels.devices.device import HostCopy, array_to_device
from quire.kv.eviction.scores import WeightArray
from quire.models.config import ModelConfig
from quire.models.rotary import RotaryTable
from quire.step import Int64Array


def by_layer(
    layers: Int64Array, columns: Int64Array, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each of `layers` [N], which ascend, and its part [C, n] of `columns` [C, N] on a device.

    All are copied there at once.
    """
    names, starts = np.unique(layers, return_index=True)
    parts = array_to_device(columns, device).tensor_split(starts[1:].tolist(), dim=1)
    yield from zip(names.tolist(), parts, strict=False)


def cached_keys(kv: KVLayer, block_ids: Int64Array) -> WeightArray:
    """Return the keys in some blocks of a layer, [kv_heads, blocks * block_size, head_dim], on the host.

    They come to the host as they are stored; it waits for them.
    """
    index = array_to_device(block_ids, kv.key_pages.device)
    copies = [
        None if pages is None else HostCopy(pages_of(pages, index).transpose(0, 1))
        for pages in (kv.key_pages, kv.key_scales)
    ]
    pages, scales = (None if copy is None else copy.wait().transpose(0, 1) for copy in copies)
    assert pages is not None
    keys: WeightArray = vectors_in(pages, scales, kv.quantizer).numpy()
    return keys


def copy_blocks(kv: KVLayer, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy a layer's part of blocks `sources` [N] to `targets` [N], none of which is a source.

    Both are int64, where the cache is.
    """
    for pages in (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales):
        if pages is not None:
            _write_pages(pages, targets, pages_of(pages, sources))


def _write_pages(pages: torch.Tensor, block_ids: torch.Tensor, new: torch.Tensor) -> None:
    """Overwrite pages of all, [kv_heads, blocks, ...], by `new`, [kv_heads, N, ...]."""
    pages.transpose(0, 1).index_copy_(0, block_ids, new.transpose(0, 1))


class KeyRotation:
    """Turns rotated keys back to earlier positions.

    Args:
        model: with one rotary embedding that all layers share and that rotates whole heads, and keys that
            are not quantized.
        device: where the cache is.
    """

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self._table = RotaryTable(model.ropes[0], model.max_model_len, device)

    def turn_back(
        self, kv: KVLayer, block_ids: torch.Tensor, distances: torch.Tensor, *, farthest: int
    ) -> None:
        """Turn the keys in blocks [N] of a layer back by `distances` positions, [N], at most by `farthest`.

        A key rotated by position p becomes what it would be at p - distance, but for rounding. Blocks and
        distances are int64, where the cache is.
        """
        cos, sin = self._table.rows(distances, last=farthest)
        cos, sin = cos[:, None, :], sin[:, None, :]  # [N, 1, head_dim / 2]
        first, second = pages_of(kv.key_pages, block_ids).float().chunk(2, dim=-1)
        keys = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        _write_pages(kv.key_pages, block_ids, keys.to(kv.key_pages.dtype))
