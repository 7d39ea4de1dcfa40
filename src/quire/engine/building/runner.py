"""Loading the models of an engine, and building the runner that computes its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.building.drafting import build_proposer, load_draft_model, weight_options
from quire.engine.ranks.starting import load_with_ranks, threads_of_rank
from quire.kv.cache.state_layout import StateLayout

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.building.drafting import DraftModel
    from quire.engine.memory.plan import MemoryPlan
    from quire.engine.ranks.group import RankGroup
    from quire.execution.model import Model
    from quire.execution.model_runner import ModelRunner
    from quire.kernels.interface import Capture
    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.state_cache import StateCache
    from quire.kv.connectors.interface import KVConnector
    from quire.models.config import ModelConfig
    from quire.models.decoder import Decoder

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes read, total bytes) while the weights load."""


@dataclasses.dataclass(slots=True, frozen=True)
class LoadedModels:
    """The models of an engine, with their weights."""

    target: Model
    draft: Decoder | None  # None: there is no draft model
    ranks: RankGroup | None  # that have shards of the target model; None: there is one rank


def load_models(
    config: EngineConfig,
    model_path: Path,
    model_config: ModelConfig,
    plan: MemoryPlan,
    *,
    ranks: RankGroup | None,
    draft_model: DraftModel | None,
    on_progress: ProgressCallback | None,
) -> LoadedModels:
    """Load the weights; torch is imported here."""
    from quire.kernels.dispatch import kernel_set
    from quire.models.checkpoints.loading import load_decoder

    num_threads = threads_of_rank(config.num_threads, config.tensor_parallel_size)
    kernel_set(config.kernels).use_threads(num_threads)
    options = weight_options(config, model_config)
    target: Model
    if ranks is None:
        target = load_decoder(model_path, model_config, options=options, on_progress=on_progress)
    else:
        target = load_with_ranks(
            ranks,
            model_path,
            model_config,
            options=options,
            num_threads=num_threads,
            on_progress=on_progress,
        )
    draft = None if draft_model is None else load_draft_model(config, draft_model, plan)
    return LoadedModels(target, draft, ranks)


def build_runner(
    config: EngineConfig,
    models: LoadedModels,
    plan: MemoryPlan,
    *,
    connector: KVConnector | None,
    max_captured_tokens: int = 0,
) -> ModelRunner:
    """Allocate the KV caches, and return the runner over them.

    `max_captured_tokens` is what `profile_run` returns.
    """
    from quire.execution.model_runner import ModelRunner

    scheduler = config.scheduler
    capture_drafts = None if models.draft is None else _capture(config, models.draft)
    kv_caches, states = _kv_caches(models, plan)
    proposer = build_proposer(
        config,
        models.draft,
        plan,
        vocab_size=models.target.config.vocab_size,
        states=states,
        capture=capture_drafts,
    )
    runner = ModelRunner(
        models.target,
        kv_caches,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        proposer=proposer,
        connector=connector,
        eviction=scheduler.cache_eviction_config if scheduler.use_cache_eviction else None,
        sparse_attention=scheduler.sparse_attention_config if scheduler.use_sparse_attention else None,
        states=states,
        capture=_capture(config, models.target) or _recording(config, models),
    )
    runner.max_captured_tokens = max_captured_tokens
    return runner


def _kv_caches(
    models: LoadedModels, plan: MemoryPlan
) -> tuple[tuple[PagedAttentionCache, ...], StateCache | None]:
    """Return memory for the target model's KV of each cache group, on all ranks, and for its states, if any.

    Peers read both, so they are in one allocation, but for those of ranks, whose states no peer reads.
    """
    from quire.kv.cache.paged_cache import caches_on_device
    from quire.kv.cache.state_cache import StateCache

    groups, device, states = plan.kv_caches, models.target.kernels.device, plan.states
    if models.ranks is not None:
        from quire.engine.ranks.leading import LeadingStates, leading_caches

        leading = None
        if states is not None:
            own = StateLayout.of(models.target.config.state_layers, plan.dtype)
            if states.draft_layout is not None:
                own = own.followed_by(states.draft_layout)
            leading = LeadingStates.leading(
                own, device, models.ranks, num_slots=states.num_slots, num_states=states.num_states
            )
        return leading_caches(groups, device, models.ranks, leading), leading
    if states is None:
        return caches_on_device(groups, device)[0], None
    caches, memory = caches_on_device(
        groups, device, num_more=states.num_bytes, alignment=states.layout.alignment
    )
    return caches, StateCache(states.layout, memory, num_slots=states.num_slots)


def _capture(config: EngineConfig, model: Model | Decoder) -> Capture | None:
    """Return the graph capture of steps on a GPU; the model's buffers keep their addresses from now on."""
    if config.device != "cuda" or not config.cuda_graphs:
        return None
    from quire.kernels.devices.cuda_graphs import CudaGraphs
    from quire.kernels.size_classes import wide_size_class

    model.reserve(wide_size_class(config.scheduler.max_num_batched_tokens))
    return CudaGraphs().capture


def _recording(config: EngineConfig, models: LoadedModels) -> Capture | None:
    """Return what kernels record steps with that one rank computes on the host; buffers as for `_capture`."""
    kernels = models.target.kernels
    if models.ranks is not None or kernels.capture is None or not kernels.sampling.is_synchronous:
        return None
    models.target.reserve(config.scheduler.max_num_batched_tokens)
    return kernels.capture
