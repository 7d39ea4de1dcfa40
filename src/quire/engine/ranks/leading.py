"""Rank 0's model and KV cache: what is done to them, the other ranks do to their shards.

Everything else of an engine is on rank 0 alone: requests, sampling, drafts and draft models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.messages import (
    AllocateCaches,
    CompileOnly,
    CopyBlocks,
    CopyStates,
    Forward,
    Logits,
    Reserve,
    WholeStep,
)
from quire.engine.ranks.rank_decoder import RankDecoder
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.interface import KernelSet
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.cache.shard_memory import ShardMemory
from quire.kv.cache.state_cache import StateCache
from quire.kv.cache.state_layout import StateLayout
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, LayerHook
from quire.models.parallel import Communicator
from quire.models.row_layers import DenseRows
from quire.models.shard import Shard
from quire.step import IntArray


class LeadingDecoder:
    """See `quire.execution.model_runner.Model`. Raises `EngineDeadError` if a rank fails, this one included.

    The ranks are told what to compute by messages; what may be on a device only, they get from rank 0's.

    Args:
        decoder: of rank 0.
        communicator: of rank 0.
        ranks: the others.
    """

    def __init__(self, decoder: Decoder, communicator: Communicator, ranks: RankGroup) -> None:
        self._decoder = decoder
        self._communicator = communicator
        self._ranks = ranks
        self._own = RankDecoder(decoder, communicator, Shard(0, ranks.size))

    @property
    def config(self) -> ModelConfig:
        """Of this rank's shard."""
        return self._decoder.config

    @property
    def row_layers(self) -> Sequence[DenseRows]:
        """Of this rank."""
        return self._decoder.row_layers

    @property
    def kernels(self) -> KernelSet:
        """Of this rank."""
        return self._decoder.kernels

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: Sequence[KVLayer],
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        self._ranks.send(_forward(batch))
        with self._failing_together():
            return self._own.forward(token_ids, kv, batch, hook=hook)

    @contextlib.contextmanager
    def whole_step(
        self, batch: AttentionBatch, logit_rows: npt.NDArray[np.int64] | None
    ) -> Iterator[RankDecoder]:
        """See `quire.execution.model.Model.whole_step`."""
        self._ranks.send(WholeStep(_forward(batch), logit_rows))
        with self._failing_together():
            yield self._own
            self._communicator.note_replay()

    def reserve(self, num_tokens: int) -> None:
        """See `Decoder.reserve`; of all ranks."""
        self._ranks.send(Reserve(num_tokens))
        self._decoder.reserve(num_tokens)

    def compile_only(self) -> contextlib.AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`; all ranks compile at the same time."""
        own = self._decoder.compile_only()
        return None if own is None else self._compiling_together(own)

    @contextlib.contextmanager
    def _compiling_together(self, own: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        self._ranks.send(CompileOnly(begins=True))
        with own:
            yield
            self._ranks.send(CompileOnly(begins=False))

    @property
    def finds_largest_logits(self) -> bool:
        """All ranks compute all of theirs."""
        return False

    def logits(self, hidden: torch.Tensor, num_largest: torch.Tensor | int | None = None) -> torch.Tensor:
        """See `Decoder.logits`."""
        hidden = hidden.contiguous()
        self._ranks.send(Logits(len(hidden)))
        with self._failing_together():
            return self._own.logits(hidden)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._ranks.failure(error) from error


def _forward(batch: AttentionBatch) -> Forward:
    assert batch.key_scores is None, "each rank has the scores of its own heads only"
    groups, states = (batch, *batch.others), batch.states
    return Forward(
        positions=batch.positions.numpy(),
        block_size=batch.block_size,
        slot_blocks=np.stack([each.slot_blocks.numpy() for each in groups]),
        slot_offsets=batch.slot_offsets.numpy(),
        num_cached_tokens=batch.num_cached_tokens,
        num_tokens=batch.num_tokens,
        block_tables=np.stack([each.block_tables for each in groups]),
        skipped_keys=batch.skipped_keys,
        key_selection=batch.key_selection,
        state_numbers=None if states is None else states.numbers,
        num_state_tokens=None if states is None else states.num_tokens,
    )


class LeadingCache(PagedAttentionCache):
    """Rank 0's KV cache; the others have blocks of the same numbers, with the KV of their heads."""

    _ranks: RankGroup
    _group: int

    @classmethod
    def leading(
        cls, metadata: PagedAttentionCacheMetaData, device: torch.device, ranks: RankGroup, group: int
    ) -> Self:
        """Return the cache of a group, whose blocks `ranks` copy too."""
        cache = cls.on_device(metadata, device)
        cache._ranks, cache._group = ranks, group
        return cache

    @override
    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        if len(copies):
            self._ranks.send(CopyBlocks(copies, self._group))
        super().copy_blocks(copies)


class LeadingStates(StateCache):
    """Rank 0's states of recurrent layers; the others have states of the same numbers, of their features."""

    _ranks: RankGroup

    @classmethod
    def leading(
        cls, layout: StateLayout, device: torch.device, ranks: RankGroup, *, num_slots: int, num_states: int
    ) -> Self:
        """Return the states of a layout that is rank 0's; `ranks` copy theirs when these are copied."""
        states = cls.on_device(layout, device, num_slots=num_slots, num_states=num_states)
        states._ranks = ranks
        return states

    @override
    def copy(self, copies: IntArray, *, at_once: bool = False) -> None:
        if len(copies):
            self._ranks.send(CopyStates(copies, at_once))
        super().copy(copies, at_once=at_once)


class SharedCache(PagedAttentionCache):
    """Rank 0's KV cache where this process can reach that of all ranks: it copies blocks for them, too.

    So a copy has been made on all ranks before anything else is written to its source. No other rank uses KV
    between two forward passes: when one ends here, all ranks have given their part of its last layer.
    """

    _shards: ShardMemory
    _group: int

    @classmethod
    def sharing(cls, metadata: PagedAttentionCacheMetaData, shards: ShardMemory, group: int) -> Self:
        """Return the cache of a group in the memory that all ranks share."""
        cache = cls.over(metadata, shards.of_rank(0, group))
        cache._shards, cache._group = shards, group
        return cache

    @property
    @override
    def shards(self) -> ShardMemory:
        return self._shards

    @override
    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        if len(copies):
            source, target = torch.from_numpy(copies.astype(np.int64)).unbind(1)
            for rank in range(self._shards.num_shards):
                blocks = self._shards.of_rank(rank, self._group)
                blocks[target] = blocks[source]


def leading_caches(
    metadata: Sequence[PagedAttentionCacheMetaData],
    device: torch.device,
    ranks: RankGroup,
    states: LeadingStates | None,
) -> tuple[PagedAttentionCache, ...]:
    """Have all ranks allocate the KV cache of each cache group, in place of those before; return rank 0's.

    They allocate as many states of recurrent layers as `states` has, too.

    Raises:
        EngineDeadError: a rank has failed; it may have no room.
        OSError: there is no room for those of all ranks in memory that they share.
    """
    caches: tuple[PagedAttentionCache, ...]
    if ranks.kv_file is None:
        caches = tuple(
            LeadingCache.leading(each, device, ranks, group) for group, each in enumerate(metadata)
        )
    else:
        shards = ShardMemory(ranks.kv_file, metadata)
        caches = tuple(SharedCache.sharing(each, shards, group) for group, each in enumerate(metadata))
    numbers = (0, 0) if states is None else (states.num_slots, len(states.states))
    ranks.send(AllocateCaches(tuple(metadata), ranks.kv_file, *numbers))
    ranks.wait_until_ready()
    return caches
