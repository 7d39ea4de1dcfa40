"""A KV connector that works with tensors, layer by layer, wherever the cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from memory_connector import BlockLoad, MemoryConnector

if TYPE_CHECKING:
    from quire.kv.cache.paged_cache import PagedAttentionCache


class LayerConnector(MemoryConnector):
    """Keeps prompts' KV as tensors of the cache's device; loads are synchronous."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._kept: dict[tuple[bytes, int], torch.Tensor] = {}  # by key and layer
        self._step_loads: list[BlockLoad] = []

    @override
    def register_kv_caches(self, kv_caches: PagedAttentionCache) -> None:
        self._tensor = kv_caches.tensor

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        self._step_loads = []
        super().start_load_kv(metadata)

    @override
    def _complete(self, load: BlockLoad) -> None:
        self._step_loads.append(load)

    @override
    def wait_for_layer_load(self, layer: int) -> None:
        """What is asked for here comes before the layer's attention."""
        for load in self._step_loads:
            for key, block_id in load.blocks:
                self._tensor[block_id, layer] = self._kept[key.digest, layer]

    @override
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for save in self._saves:
            for key, block_id in save.blocks:
                self._kept[key.digest, layer] = torch.stack((keys[block_id], values[block_id]))

    @override
    def wait_for_save(self, failed_ids: frozenset[str]) -> None:
        for save in self._saves:
            if save.request_id not in failed_ids:
                for key, _ in save.blocks:
                    self.store.put(key, np.empty(0, dtype=np.uint8))
        self._saves = []
