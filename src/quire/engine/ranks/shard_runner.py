"""A shard of the model and its KV cache, on a rank other than 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from quire.engine.memory.byte_sizes import format_bytes
from quire.engine.ranks.connecting import communicator_on
from quire.engine.ranks.messages import (
    AllocateCaches,
    CompileOnly,
    CopyBlocks,
    CopyStates,
    Forward,
    Logits,
    RankStart,
    Reserve,
    ToRank,
    WholeStep,
)
from quire.engine.ranks.rank_decoder import RankDecoder
from quire.execution.step_graphs import StepGraphs
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.devices.cuda_graphs import CudaGraphs
from quire.kernels.devices.device import HOST, refusing_shortage
from quire.kernels.dispatch import kernel_set
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.paged_cache import PagedAttentionCache, views_of_layers
from quire.kv.cache.shard_memory import ShardMemory
from quire.kv.cache.state_cache import StateCache
from quire.kv.cache.state_layout import StateLayout
from quire.kv.cache.view import PagedAttentionCacheView
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
        kernels = kernel_set(start.weights.kernels)
        kernels.use_threads(start.num_threads)
        on_connecting()
        self._shard = Shard(start.rank, start.size)
        self._device = kernels.device
        self._compiling = contextlib.ExitStack()
        communicator = communicator_on(kernels.device, self._shard, start.rendezvous, timeout=start.timeout)
        self._decoder = load_decoder(
            Path(start.model_path),
            start.model,
            options=start.weights,
            parallel=TensorParallel(self._shard, communicator),
        )
        self._own = RankDecoder(self._decoder, communicator, self._shard)
        self._graphs: StepGraphs | None = None  # over the caches
        self._kv_caches: list[PagedAttentionCache] = []  # of each cache group
        self._kv: list[PagedAttentionCacheView] = []  # of each layer
        self._state_dtype = start.weights.dtype
        self._states: StateCache | None = None  # None: no layer is recurrent

    @torch.inference_mode()
    def run(self, message: ToRank) -> None:
        """Do what `message` says; nobody waits for the device.

        Raises:
            ExchangeError: another rank does not take part.
            ConfigError: there is no room for the KV cache.
        """
        match message:
            case AllocateCaches():
                self._allocate(message)
            case Reserve(num_tokens):
                self._decoder.reserve(num_tokens)
            case CompileOnly(begins):
                self._compile_only(begins=begins)
            case Forward():
                token_ids = torch.empty(len(message.positions), dtype=torch.int64, device=self._device)
                self._own.forward(token_ids, self._kv, self._batch(message))
            case Logits(num_rows):
                shape = num_rows, self._decoder.config.hidden_size
                self._own.logits(torch.empty(shape, dtype=self._decoder.dtype, device=self._device))
            case WholeStep(step, logit_rows):
                unknown = np.zeros(len(step.positions), dtype=np.int64)
                self._step_graphs().logits(unknown, self._batch(step), logit_rows)
            case CopyBlocks(copies, group):
                self._kv_caches[group].copy_blocks(copies)
            case CopyStates(copies, at_once):
                assert self._states is not None
                self._states.copy(copies, at_once=at_once)

    def _step_graphs(self) -> StepGraphs:
        """Return what does the same with the same steps as rank 0's, until there are other caches."""
        if self._graphs is None:
            self._graphs = StepGraphs(
                lambda *_: contextlib.nullcontext(self._own),
                self._kv,
                CudaGraphs().capture,
                lambda unknown: unknown,
                self._decoder.kernels,
            )
        return self._graphs

    def _compile_only(self, *, begins: bool) -> None:
        compiling = self._decoder.compile_only() if begins else None
        self._compiling.close()
        if compiling is not None:
            self._compiling.enter_context(compiling)

    def _allocate(self, message: AllocateCaches) -> None:
        self._graphs = None
        self._kv_caches, self._kv, self._states = [], [], None  # the memory of those before is free now
        if message.file is not None:
            shards = ShardMemory(message.file, message.metadata)
            os.close(message.file)
            self._kv_caches = [
                PagedAttentionCache.over(metadata, shards.of_rank(self._shard.rank, group))
                for group, metadata in enumerate(message.metadata)
            ]
        else:
            self._kv_caches = self._allocated(message.metadata)
        self._kv = views_of_layers(self._kv_caches)
        if message.num_states:
            self._states = self._allocated_states(message.num_slots, message.num_states)

    def _allocated(self, metadata: Sequence[PagedAttentionCacheMetaData]) -> list[PagedAttentionCache]:
        num_bytes = sum(each.num_pages_per_layer * each.bytes_per_block for each in metadata)
        with _refusing_shortage(f"the KV cache of {format_bytes(num_bytes)}"):
            caches = [PagedAttentionCache.on_device(each, self._device) for each in metadata]
            if self._device != HOST:
                for cache in caches:
                    cache.tensor.zero_()  # steps that are measured read what nobody has written
        return caches

    def _allocated_states(self, num_slots: int, num_states: int) -> StateCache:
        layout = StateLayout.of(self._decoder.config.state_layers, self._state_dtype)
        with _refusing_shortage(f"states of {format_bytes(num_states * layout.bytes_per_state)}"):
            return StateCache.on_device(layout, self._device, num_slots=num_slots, num_states=num_states)

    def _batch(self, message: Forward) -> AttentionBatch:
        states = None
        if message.state_numbers is not None:
            assert self._states is not None
            states = StepStates(message.state_numbers, self._states.layers, message.num_state_tokens)
        first, *others = (
            AttentionBatch(
                positions=torch.from_numpy(message.positions),
                block_size=message.block_size,
                slot_blocks=torch.from_numpy(slot_blocks),
                slot_offsets=torch.from_numpy(message.slot_offsets),
                num_cached_tokens=message.num_cached_tokens,
                num_tokens=message.num_tokens,
                block_tables=block_tables,
                states=states,
                skipped_keys=message.skipped_keys,
                key_selection=message.key_selection,
            )
            for slot_blocks, block_tables in zip(message.slot_blocks, message.block_tables, strict=True)
        )
        first.others = tuple(others)
        return first


def _refusing_shortage(what: str) -> contextlib.AbstractContextManager[None]:
    return refusing_shortage(
        lambda _: (
            f"its GPU has no room for {what}, which was planned by the memory that is free on rank 0's; "
            "lower EngineConfig.hbm_utilization, or free some of its"
        )
    )
