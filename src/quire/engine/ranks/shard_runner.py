"""A shard of the model and its KV cache, on a rank other than 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from quire.engine.ranks.gloo import GlooCommunicator
from quire.engine.ranks.messages import CopyBlocks, Forward, Logits, RankStart, ToRank
from quire.kernels.batch import AttentionBatch
from quire.kernels.dispatch import kernel_set
from quire.kv.paged_cache import PagedAttentionCache
from quire.kv.shard_memory import ShardMemory
from quire.models.checkpoints.loading import load_decoder
from quire.models.parallel import TensorParallel
from quire.models.shard import Shard


class ShardRunner:
    """Loads a shard and computes what rank 0 says.

    Args:
        start: which shard.
        on_connecting: called before it looks for the other ranks.

    Raises:
        QuireError: the shard cannot be loaded.
        ExchangeError: the ranks cannot find each other.
    """

    def __init__(self, start: RankStart, *, on_connecting: Callable[[], None]) -> None:
        kernel_set(start.weights.kernels).use_threads(start.num_threads)
        on_connecting()
        shard = Shard(start.rank, start.size)
        communicator = GlooCommunicator(shard, start.rendezvous, timeout=start.timeout)
        self._decoder = load_decoder(
            Path(start.model_path),
            start.model,
            options=start.weights,
            parallel=TensorParallel(shard, communicator),
        )
        self._kv_cache = _kv_cache(start)

    @torch.inference_mode()
    def run(self, message: ToRank) -> None:
        """Compute what `message` says.

        Raises:
            ExchangeError: another rank does not take part.
        """
        match message:
            case Forward():
                self._decoder.forward(torch.from_numpy(message.token_ids), self._kv_cache, _batch(message))
            case Logits(hidden):
                rows = torch.from_numpy(hidden).view(self._decoder.dtype)
                self._decoder.output(rows)
            case CopyBlocks(copies):
                self._kv_cache.copy_blocks(copies)


def _kv_cache(start: RankStart) -> PagedAttentionCache:
    if start.kv_file is None:
        return PagedAttentionCache.init_cache(None, start.kv_cache)
    shards = ShardMemory(start.kv_file, start.kv_cache)
    os.close(start.kv_file)
    return PagedAttentionCache.over(start.kv_cache, shards.of_rank(start.rank))


def _batch(message: Forward) -> AttentionBatch:
    return AttentionBatch(
        positions=torch.from_numpy(message.positions),
        block_size=message.block_size,
        slot_blocks=torch.from_numpy(message.slot_blocks),
        slot_offsets=torch.from_numpy(message.slot_offsets),
        num_cached_tokens=message.num_cached_tokens,
        num_tokens=message.num_tokens,
        block_tables=message.block_tables,
        skipped_keys=message.skipped_keys,
        key_selection=message.key_selection,
    )
