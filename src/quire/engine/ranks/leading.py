"""Rank 0's model and KV cache: what is done to them, the other ranks do to their shards.

Everything else of an engine is on rank 0 alone: requests, sampling, drafts and draft models.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.messages import CopyBlocks, Forward, Logits
from quire.kernels.batch import AttentionBatch
from quire.kernels.interface import KernelSet
from quire.kv.cache_metadata import PagedAttentionCacheMetaData
from quire.kv.paged_cache import PagedAttentionCache
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, LayerHook


class LeadingDecoder:
    """See `quire.execution.model_runner.Model`. Raises `EngineDeadError` if a rank fails, this one included.

    Args:
        decoder: of rank 0.
        ranks: the others.
    """

    def __init__(self, decoder: Decoder, ranks: RankGroup) -> None:
        self._decoder = decoder
        self._ranks = ranks

    @property
    def config(self) -> ModelConfig:
        """Of this rank's shard."""
        return self._decoder.config

    @property
    def kernels(self) -> KernelSet:
        """Of this rank."""
        return self._decoder.kernels

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: PagedAttentionCache,
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        assert batch.key_scores is None, "each rank has the scores of its own heads only"
        self._ranks.send(
            Forward(
                token_ids=token_ids.numpy(),
                positions=batch.positions.numpy(),
                block_size=batch.block_size,
                slot_blocks=batch.slot_blocks.numpy(),
                slot_offsets=batch.slot_offsets.numpy(),
                num_cached_tokens=batch.num_cached_tokens,
                num_tokens=batch.num_tokens,
                block_tables=batch.block_tables,
                skipped_keys=batch.skipped_keys,
                key_selection=batch.key_selection,
            )
        )
        try:
            return self._decoder.forward(token_ids, kv_cache, batch, hook=hook)
        except Exception as error:
            raise self._ranks.failure(error) from error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        hidden = hidden.contiguous()
        self._ranks.send(Logits(hidden.view(torch.uint8).numpy()))
        try:
            return self._decoder.logits(hidden)
        except Exception as error:
            raise self._ranks.failure(error) from error


class LeadingCache(PagedAttentionCache):
    """Rank 0's KV cache; the others have blocks of the same numbers, with the KV of their heads."""

    _ranks: RankGroup

    @classmethod
    def leading(cls, metadata: PagedAttentionCacheMetaData, ranks: RankGroup) -> Self:
        """Return a cache whose blocks `ranks` copy too."""
        cache = cls.init_cache(None, metadata)
        cache._ranks = ranks
        return cache

    @override
    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        if len(copies):
            self._ranks.send(CopyBlocks(copies))
        super().copy_blocks(copies)
