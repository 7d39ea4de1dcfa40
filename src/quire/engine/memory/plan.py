"""The memory plan of an engine, computed from its configuration before anything is allocated."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.engine import devices
from quire.engine.custom_classes import keeps_all_tokens, stages_kv
from quire.engine.memory.byte_sizes import GB, format_bytes
from quire.engine.memory.checks import check_fits
from quire.engine.memory.eviction import eviction_bytes, score_bytes_per_token
from quire.engine.memory.group_sizes import GroupSizes, blocks_for
from quire.engine.memory.model_sizes import ModelSizes, has_float8, has_native, model_sizes
from quire.engine.memory.state_sizes import StateSizes, with_fitting_states
from quire.errors import ConfigError
from quire.kernels import bounds
from quire.kernels.devices.cores import usable_cores
from quire.kernels.size_classes import wide_size_class
from quire.kv.blocks.groups import CacheGroup, cache_groups
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.state_layout import StateLayout
from quire.kv.eviction.lengths import eviction_lengths
from quire.kv.tiers.block_copier import num_staged_blocks
from quire.models.config import DTYPE_BYTES
from quire.models.layer import StepSizes
from quire.models.layers.per_layer import per_layer_bytes
from quire.models.shard import check_divisible, check_kv_divisible
from quire.models.weights import held_quantization

if TYPE_CHECKING:
    from quire.config import EngineConfig, SchedulerConfig
    from quire.kv.cache.page_layout import KVLayerSpec
    from quire.models.config import ModelConfig

FLOAT32_BYTES = 4
INT64_BYTES = 8
FLOAT64_BYTES = 8

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory for weights, activations and KV cache.

    Sizes are in bytes and lengths in tokens. `activation_bytes` is what the largest step takes beside weights
    and KV, estimated or measured, and `score_bytes` a bound; the other sizes are exact. The properties,
    `num_parameters` and `weight_bytes` include the draft model, if there is one; `dtype`, `quantization` and
    `kv_dtype` are those of the target model, `quantization` that of most matrices (`held_quantization`).
    `max_model_len` is the limit for requests: the configured length, or the model's maximum, reduced to what
    fits into the KV cache.

    Layers with a window may have cache groups of their own, which keep less. Numbers of blocks and tokens are
    those of the first group, which keeps all tokens; bytes are those of all groups.

    With several ranks, sizes in bytes are those of the rank that needs most, as if it had the draft model
    like rank 0, and `available_bytes` is its share. All ranks have equally many blocks.
    """

    dtype: str
    quantization: str
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    available_bytes: int
    kv_caches: tuple[PagedAttentionCacheMetaData, ...]  # of the target model's cache groups
    draft_cache: PagedAttentionCacheMetaData | None  # of the draft model, with the blocks of the first group
    windows: tuple[int, ...]  # tokens that the layers of each group but the first see
    group_sizes: GroupSizes
    score_bytes_per_block: int  # that cache eviction has of the tokens of a KV block, at most
    max_num_seqs: int
    max_model_len: int
    model_max_len: int
    states: StateSizes | None = None  # of recurrent layers
    num_ranks: int = 1
    is_measured: bool = False  # `activation_bytes`
    stages_kv: bool = False  # blocks pass through a buffer of the device on their way to a KV tier

    @property
    def weight_type(self) -> str:
        """Dtype or quantization of most weights."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def kv_dtype(self) -> str:
        """Dtype of the target model's KV cache."""
        return self.kv_caches[0].dtype

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.kv_caches[0].page_size

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that keep all tokens."""
        return self.kv_caches[0].num_pages_per_layer

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers, while all of them keep it."""
        return self.kv_bytes_per_block // self.block_size

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block of each group, over all layers."""
        return sum(self.group_sizes.bytes_per_block)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache."""
        caches = self.kv_caches if self.draft_cache is None else (*self.kv_caches, self.draft_cache)
        return sum(cache.num_pages_per_layer * cache.bytes_per_block for cache in caches)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens whose KV fits into the cache."""
        return self.num_blocks * self.block_size

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores that cache eviction has, if the whole KV cache is in use."""
        return self.score_bytes_per_block * self.num_blocks

    @property
    def staged_bytes(self) -> int:
        """Bytes of a GPU that blocks pass through on their way to a KV tier; the host pins as many."""
        bytes_per_block = sum(cache.bytes_per_block for cache in self.kv_caches)
        return num_staged_blocks(bytes_per_block) * bytes_per_block if self.stages_kv else 0

    @property
    def total_bytes(self) -> int:
        """Weights, activations, KV cache, states, scores of cache eviction and staged blocks together."""
        return self.taken_bytes + self.kv_bytes + self.score_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes that do not depend on the size of the KV cache."""
        return self.weight_bytes + self.activation_bytes + self.staged_bytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers, of the draft model's, too."""
        return 0 if self.states is None else self.states.total_bytes

    @property
    def blocks_text(self) -> str:
        """The number and size of the blocks of each group, in words."""
        numbers = zip(self.kv_caches, self.group_sizes.bytes_per_block, strict=True)
        texts = [f"{cache.num_pages_per_layer} blocks of {format_bytes(size)}" for cache, size in numbers]
        windows = [f"{text} for the window of {w}" for w, text in zip(self.windows, texts[1:], strict=True)]
        return ", ".join([texts[0], *windows])

    def max_sequences_at(self, length: int) -> int:
        """Return how many sequences of `length` tokens can run at once, without shared prefixes."""
        return min(self.max_num_seqs, self.num_blocks // blocks_for(length, self.block_size))

    def with_blocks(self, num_blocks: Sequence[int]) -> Self:
        """Return the plan with other numbers of blocks, one for each group; the draft model has the first."""
        draft = self.draft_cache
        return dataclasses.replace(
            self,
            kv_caches=tuple(
                cache.with_pages(number) for cache, number in zip(self.kv_caches, num_blocks, strict=True)
            ),
            draft_cache=None if draft is None else draft.with_pages(num_blocks[0]),
        )


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    draft_model: ModelConfig | None = None,
    available_bytes: int | None = None,
    measured_bytes: int | None = None,
) -> MemoryPlan:
    """Plan an engine's memory.

    The KV cache gets `num_kv_blocks` blocks if that is set, else `cache_size`, else `memory_fraction` of
    what weights and activations leave, but at most what `max_num_seqs` sequences of maximum length can use.
    On a GPU, it gets what these leave of `hbm_utilization` of the free memory.
    If a sequence of the model's maximum length does not fit, the longest length that does is the limit; with
    cache eviction, only what the sequence keeps has to fit. If the states of `max_num_seqs` sequences would
    take more than a quarter of the memory, there are fewer sequences.

    Args:
        config: of the engine.
        model: the target model.
        draft_model: the draft model, if any.
        available_bytes: memory to plan for, of all ranks on a CPU, and of each one's GPU; None: what is
            available to this process on `config.device`.
        measured_bytes: what the largest step was seen to take beside weights and KV; None: it is estimated.

    Raises:
        ConfigError: weights or KV cache do not fit, or the cache cannot hold one sequence of the configured
            length; the message has the sizes, the field to change, and the largest value that fits.
    """
    size = config.tensor_parallel_size
    check_divisible(model, size)
    if config.shares_kv:
        check_kv_divisible(model, size)
    if available_bytes is None:
        available_bytes = devices.available_bytes(config)
    available = available_bytes if config.device == "cuda" else available_bytes // size
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(
            f"EngineConfig.max_model_len is {wanted}; the maximum of this model is {model.max_model_len}"
        )
    models = [model_sizes(config, model, size)]
    if draft_model is not None:
        models.append(model_sizes(config, draft_model, 1))
    layout, draft_layout = _state_layouts(models)
    if layout.bytes_per_state:
        num_bytes = layout.bytes_per_state + (0 if draft_layout is None else draft_layout.bytes_per_state)
        scheduler = with_fitting_states(config.scheduler, num_bytes, available)
        config = dataclasses.replace(config, scheduler=scheduler)

    def plan_at(length: int) -> MemoryPlan:
        return _plan_at(length, config, models, available_bytes=available, measured_bytes=measured_bytes)

    def exceeds_cache(length: int) -> bool:
        return plan_at(length).num_kv_tokens < _min_held(config.scheduler, length)

    plan = plan_at(wanted)
    if exceeds_cache(wanted):
        # A shorter maximum length also needs less memory for activations, so the cache gets larger.
        fitting = bisect.bisect(range(2, wanted), False, key=exceeds_cache)
        plan = plan_at(fitting + 1)
    check_fits(config, plan)
    return plan


def plan_memory_again(
    config: EngineConfig,
    model: ModelConfig,
    num_blocks: int,
    *,
    draft_model: ModelConfig | None = None,
    available_bytes: int | None = None,
    measured_bytes: int | None = None,
) -> MemoryPlan:
    """Plan the memory of an engine that replaces another, with its number of KV blocks if they fit.

    With fewer blocks, a request that the other engine had accepted might not fit.

    Args:
        config: of both engines.
        model: the target model.
        num_blocks: of the engine that is replaced; 0: there is none.
        draft_model: the draft model, if any.
        available_bytes, measured_bytes: as for `plan_memory`.

    Raises:
        ConfigError: as `plan_memory`.
    """
    plan = functools.partial(
        plan_memory,
        model=model,
        draft_model=draft_model,
        available_bytes=available_bytes,
        measured_bytes=measured_bytes,
    )
    scheduler = config.scheduler
    if num_blocks and not scheduler.num_kv_blocks and not scheduler.cache_size:
        pinned = dataclasses.replace(scheduler, num_kv_blocks=num_blocks)
        try:
            return plan(dataclasses.replace(config, scheduler=pinned))
        except ConfigError as error:
            logger.warning("the KV cache is smaller than the previous engine's: %s", error)
    return plan(config)


def _min_held(scheduler: SchedulerConfig, length: int) -> int:
    """Return the tokens that a sequence of `length` holds at once, however short its prompt."""
    lengths = eviction_lengths(scheduler)
    return length if lengths is None else int(lengths.max_held(np.array(1), np.array(length)))


def _plan_at(
    length: int,
    config: EngineConfig,
    models: list[ModelSizes],
    *,
    available_bytes: int,
    measured_bytes: int | None,
) -> MemoryPlan:
    """Return the plan with `length` as the maximum length of a sequence, whether or not that fits.

    Args:
        length: in tokens.
        config: the engine's configuration.
        models: the model itself, and the draft model if there is one.
        available_bytes: memory to plan for.
        measured_bytes: as for `plan_memory`.
    """
    scheduler = config.scheduler
    activations = measured_bytes
    if activations is None:
        activations = sum(_estimated_bytes(config, each, length) for each in models)
    target, *drafts = models
    groups = _cache_groups(config, target, length)
    caches = [_empty_cache(scheduler, target, group.layers, length) for group in groups]
    draft_caches = [_empty_cache(scheduler, draft, draft.kv_layers, length) for draft in drafts]
    bytes_per_block = [cache.bytes_per_block for cache in caches]
    bytes_per_block[0] += sum(cache.bytes_per_block for cache in draft_caches)
    windows = tuple(group.window for group in groups[1:])
    empty = MemoryPlan(
        dtype=target.dtype,
        quantization=held_quantization(target.model, config.quantization, has_float8=has_float8(config)),
        num_parameters=sum(each.num_parameters for each in models),
        weight_bytes=sum(each.weight_bytes for each in models),
        activation_bytes=activations,
        available_bytes=available_bytes,
        kv_caches=tuple(caches),
        draft_cache=draft_caches[0] if draft_caches else None,
        windows=windows,
        group_sizes=GroupSizes.of(scheduler, windows, bytes_per_block, max_model_len=length),
        score_bytes_per_block=scheduler.block_size
        * score_bytes_per_token(scheduler, target.model, on_gpu=config.device == "cuda"),
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=length,
        model_max_len=target.model.max_model_len,
        num_ranks=target.num_ranks,
        is_measured=measured_bytes is not None,
        stages_kv=stages_kv(config),
    )
    layout, draft_layout = _state_layouts(models)
    if layout.bytes_per_state:
        if config.moves_kv_by:
            layout = layout.in_pieces(sum(cache.bytes_per_block for cache in caches))
        free = available_bytes - empty.taken_bytes
        states = StateSizes.of(scheduler, layout, free, draft_layout)
        empty = dataclasses.replace(empty, states=states)
    return empty.with_blocks(empty.group_sizes.num_blocks(_num_blocks(config, empty)))


def _state_layouts(models: Sequence[ModelSizes]) -> tuple[StateLayout, StateLayout | None]:
    """Return the layout of the states of all models, and that of the draft model's part, if it has any."""
    target, *drafts = (StateLayout.of(each.model.state_layers, each.dtype) for each in models)
    if not drafts or not drafts[0].bytes_per_state:
        return target, None
    return target.followed_by(drafts[0]), drafts[0]


def _estimated_bytes(config: EngineConfig, sizes: ModelSizes, length: int) -> int:
    """Return what the largest step of a model takes; each has its own buffers."""
    return activation_bytes(
        config.scheduler,
        sizes.model,
        sizes.dtype,
        max_model_len=length,
        num_drafts=config.speculation.max_drafts(config.scheduler.max_num_seqs),
        is_native=has_native(config),
        on_gpu=config.device == "cuda",
        num_ranks=sizes.num_ranks,
        num_threads=max(1, (config.num_threads or usable_cores()) // sizes.num_ranks),
    )


def _cache_groups(config: EngineConfig, target: ModelSizes, length: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups of the target model's layers, for sequences of up to `length` tokens."""
    gives_back = any(spec is not None and 0 < spec.window < length for spec in target.kv_layers)
    are_in_one = config.shares_kv and target.model.has_states  # pieces of states travel as its blocks
    return cache_groups(target.kv_layers, keeps_all=not gives_back or are_in_one or keeps_all_tokens(config))


def _empty_cache(
    scheduler: SchedulerConfig, sizes: ModelSizes, layers: Sequence[KVLayerSpec | None], length: int
) -> PagedAttentionCacheMetaData:
    """Return what the KV cache of these layers of a model is, without blocks."""
    return PagedAttentionCacheMetaData.for_layers(
        layers,
        kv_head_shards=sizes.kv_head_shards,
        page_size=scheduler.block_size,
        dtype=sizes.kv_dtype,
        num_pages=0,
        batch_size=scheduler.max_num_seqs,
        max_sequences=length,
    )


def _num_blocks(config: EngineConfig, plan: MemoryPlan) -> int:
    """Return the number of blocks of the first group."""
    scheduler, sizes = config.scheduler, plan.group_sizes
    if scheduler.num_kv_blocks:
        return scheduler.num_kv_blocks
    if scheduler.cache_size:
        return sizes.largest(int(scheduler.cache_size * GB) // plan.num_ranks)
    if config.device == "cuda":
        allowed = int(plan.available_bytes * config.hbm_utilization) - plan.taken_bytes
    else:
        allowed = int((plan.available_bytes - plan.taken_bytes) * config.memory_fraction)
    return min(sizes.largest(allowed, beside=plan.score_bytes_per_block), sizes.most_running)


def activation_bytes(
    scheduler: SchedulerConfig,
    model: ModelConfig,
    dtype: str,
    *,
    max_model_len: int,
    num_drafts: int = 0,
    is_native: bool = True,
    on_gpu: bool = False,
    num_ranks: int = 1,
    num_threads: int = 1,
) -> int:
    """Estimate the buffers and temporary tensors of the largest step in bytes.

    Counts the buffers that a model keeps (`quire.models.decoder.Workspace`), and what is alive beside them at
    the widest point of a step of `max_num_batched_tokens` tokens: inside a sub-layer, as that says, or in the
    sampler (of a model that is pooled, in the pooler) with `max_num_seqs` rows and `num_drafts` more,
    whichever is most. `model` is that of one of `num_ranks` ranks, which also hold what they exchange; each
    computes on `num_threads`. With `on_gpu`, only what is in the GPU's memory counts, with the angles of all
    positions.
    """
    scheduler = scheduler.with_step_tokens()  # an engine's are decided already
    tokens = scheduler.max_num_batched_tokens
    if on_gpu:
        tokens = wide_size_class(tokens)  # captured steps are rounded up
    places = min(scheduler.max_num_seqs + num_drafts, tokens)
    logit_rows = min(bounds.prompt_logit_rows(model.vocab_size, places), tokens)
    step = StepSizes(
        scheduler=scheduler,
        tokens=tokens,
        max_model_len=max_model_len,
        hidden_size=model.hidden_size,
        item=DTYPE_BYTES[dtype],
        is_native=is_native,
        on_gpu=on_gpu,
        num_threads=num_threads,
    )
    parts = dict.fromkeys(model.parts)
    buffers: dict[str, int] = {}
    for part in parts:
        for name, shape in part.buffers().items():
            buffers[name] = max(buffers.get(name, 0), math.prod(shape))
    # Residual stream, normalized rows, output of a sub-layer; and what those keep that share memory by name.
    kept = tokens * (3 * model.hidden_size + sum(buffers.values())) * step.item
    kept += per_layer_bytes(model, step)
    kept += logit_rows * model.vocab_size * FLOAT32_BYTES if model.pooling is None else 0
    if num_ranks > 1:
        kept += _exchange_bytes(model, tokens, places, num_ranks) + on_gpu * bounds.NCCL_BYTES
    kept += eviction_bytes(scheduler, model, max_model_len, on_gpu=on_gpu)
    angles = max_model_len if on_gpu else tokens  # of tables, or of the step's positions
    kept += angles * sum(rope.rotary_dim for rope in model.ropes) * FLOAT32_BYTES
    if on_gpu:
        count_bytes = 2 if max_model_len < bounds.SHORT_COUNTS_END else 4
        kept += scheduler.max_num_seqs * model.vocab_size * count_bytes  # of tokens, for penalties
    if model.pooling is not None:
        kept += scheduler.max_num_seqs * model.hidden_size * FLOAT64_BYTES
        sampler = 4 * bounds.POOLED_TOKENS * model.hidden_size * FLOAT64_BYTES
    elif on_gpu or is_native:
        sampler = places * bounds.MAX_HEAD_TOKENS * (FLOAT32_BYTES + INT64_BYTES + 2 * FLOAT64_BYTES)
        sampler += places * model.vocab_size * FLOAT32_BYTES  # the logits before penalties and masks
    else:
        # The logits before penalties and masks; their float64 values in sampling, and a sort order.
        sampler = places * model.vocab_size * (FLOAT32_BYTES + FLOAT64_BYTES + INT64_BYTES)
    return kept + max([sampler, *(part.peak_bytes(step) for part in parts)])


def _exchange_bytes(model: ModelConfig, tokens: int, places: int, num_ranks: int) -> int:
    """Return the bytes of one rank's part of what is summed or gathered, of all parts, and of the sum."""
    part = max(tokens * model.hidden_size, places * -(-model.vocab_size // num_ranks)) * FLOAT32_BYTES
    return part * (num_ranks + 2)
