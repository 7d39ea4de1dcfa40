"""Memory for the buffers and temporary tensors of steps, estimated from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import SparseAttentionMode
from quire.engine.memory.eviction import eviction_bytes
from quire.kernels import bounds
from quire.kernels.size_classes import wide_size_class
from quire.models.config import DTYPE_BYTES

if TYPE_CHECKING:
    from quire.config import SchedulerConfig
    from quire.models.config import ModelConfig

FLOAT32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8
FLOAT64_BYTES = 8


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

    Counts the buffers that a model keeps (`quire.models.workspace`), and what is alive beside them at the
    widest point of a step of `max_num_batched_tokens` tokens: inside attention, inside the feed-forward
    layer, or in the sampler with `max_num_seqs` rows and `num_drafts` more, whichever is most. `model` is
    that of one of `num_ranks` ranks, which also hold what they exchange; each computes on `num_threads`. With
    `on_gpu`, only what is in the GPU's memory counts, with the angles of all positions.
    """
    scheduler = scheduler.with_step_tokens()  # an engine's are decided already
    tokens = scheduler.max_num_batched_tokens
    if on_gpu:
        tokens = wide_size_class(tokens)  # recorded steps are rounded up
    places = min(scheduler.max_num_seqs + num_drafts, tokens)
    logit_rows = min(bounds.prompt_logit_rows(model.vocab_size, places), tokens)
    item = DTYPE_BYTES[dtype]
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    inner = model.intermediate_size
    # Residual stream, normalized rows, output of a layer; gate and up, and their product.
    kept = tokens * (3 * model.hidden_size + qkv + attended + 3 * inner) * item
    kept += logit_rows * model.vocab_size * FLOAT32_BYTES
    if num_ranks > 1:
        kept += _exchange_bytes(model, tokens, places, num_ranks) + on_gpu * bounds.NCCL_BYTES
    widest = max(model.hidden_size, attended, inner, model.moe_intermediate_size)
    rows = tokens * widest * FLOAT32_BYTES  # as the products read them
    attention = _attention_bytes(
        scheduler, model, max_model_len, is_native=is_native, on_gpu=on_gpu, num_threads=num_threads
    )
    if on_gpu:
        attention += gpu_key_selection_bytes(scheduler, model, max_model_len)
    else:
        attention += key_selection_bytes(scheduler, model, max_model_len, num_threads)
    kept += eviction_bytes(scheduler, model, max_model_len, on_gpu=on_gpu)
    if on_gpu:
        count_bytes = 2 if max_model_len < bounds.SHORT_COUNTS_END else 4
        kept += scheduler.max_num_seqs * model.vocab_size * count_bytes  # of tokens, for penalties
        kept += max_model_len * sum(rope.rotary_dim for rope in model.ropes) * FLOAT32_BYTES
    if on_gpu or is_native:
        sampler = places * bounds.MAX_HEAD_TOKENS * (FLOAT32_BYTES + INT64_BYTES + 2 * FLOAT64_BYTES)
        sampler += places * model.vocab_size * FLOAT32_BYTES  # the logits before penalties and masks
    else:
        attention += tokens * (qkv + attended) * FLOAT32_BYTES
        rows += tokens * (2 * model.hidden_size + 3 * inner) * FLOAT32_BYTES
        # The logits before penalties and masks; their float64 values in sampling, and a sort order.
        sampler = places * model.vocab_size * (FLOAT32_BYTES + FLOAT64_BYTES + INT64_BYTES)
    return kept + max(attention, rows + _expert_bytes(model, tokens, item, on_gpu=on_gpu), sampler)


def _exchange_bytes(model: ModelConfig, tokens: int, places: int, num_ranks: int) -> int:
    """Return the bytes of one rank's part of what is summed or gathered, of all parts, and of the sum."""
    part = max(tokens * model.hidden_size, places * -(-model.vocab_size // num_ranks)) * FLOAT32_BYTES
    return part * (num_ranks + 2)


def _expert_bytes(model: ModelConfig, tokens: int, item: int, *, on_gpu: bool) -> int:
    """Return the bytes of what experts compute; one after the other, if one gets every token."""
    if not model.num_experts:
        return 0
    if on_gpu:  # inner features, as they are and as they are multiplied, and results
        of_pair = (2 * model.moe_intermediate_size + model.hidden_size) * item + bounds.GPU_PAIR_BYTES
        return tokens * model.num_experts_per_token * of_pair
    outputs = model.num_experts_per_token * model.hidden_size * FLOAT32_BYTES
    of_one = (2 * model.hidden_size + 3 * model.moe_intermediate_size) * item
    of_one += model.hidden_size * FLOAT32_BYTES
    return tokens * (outputs + of_one)


def _attention_bytes(
    scheduler: SchedulerConfig,
    model: ModelConfig,
    max_model_len: int,
    *,
    is_native: bool,
    on_gpu: bool,
    num_threads: int,
) -> int:
    """Return the maximum scratch memory of attention in bytes."""
    if on_gpu:  # those of recorded steps have memory of their own
        return 2 * bounds.GPU_TILE_HEIGHTS * bounds.GPU_PART_BYTES
    if is_native and not model.head_dim % bounds.HEAD_DIM_MULTIPLE and model.head_dim <= bounds.MAX_HEAD_DIM:
        return native_attention_bytes(model, max_model_len, num_threads)
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return _reference_attention_bytes(model, rows, max_model_len)


def native_attention_bytes(model: ModelConfig, max_model_len: int, num_threads: int) -> int:
    """Return the most scratch memory that the native attention takes in bytes.

    Each thread has the queries of a task, a tile of keys and of values, and two states. If there are few
    tasks for the threads, each span of a task has a state as well.
    """
    rows = max(bounds.BLOCK_ROWS, model.num_heads // model.num_kv_heads)
    rows = -(-rows // bounds.LANES) * bounds.LANES
    state = rows * (1 + bounds.LANES + model.head_dim) * FLOAT32_BYTES
    tiles = (rows + 2 * bounds.TILE) * model.head_dim * FLOAT32_BYTES
    of_thread = tiles + 2 * state + bounds.THREAD_BYTES
    spans = -(-max_model_len // bounds.SPAN)
    if spans == 1 or num_threads == 1:
        return num_threads * of_thread
    of_spans = (bounds.TASKS_PER_THREAD * num_threads - 1) * spans * state
    return num_threads * of_thread + min(of_spans, bounds.MAX_SPAN_BYTES)


def _reference_attention_bytes(model: ModelConfig, num_seqs: int, max_model_len: int) -> int:
    """Return the bytes of the float32 intermediates of `quire.kernels.attention.paged` at their bound.

    One query block against all tiles of the longest sequence always runs in one go; more run together as
    long as each intermediate stays within the bound.
    """
    tiles = -(-max_model_len // bounds.TILE)
    block_rows = bounds.TILE * model.num_heads // model.num_kv_heads
    width = max(bounds.TILE, model.head_dim)
    one_block = tiles * model.num_kv_heads * block_rows * width
    floats = max(one_block, min(bounds.SCRATCH_FLOATS, num_seqs * one_block))
    return bounds.INTERMEDIATES * floats * FLOAT32_BYTES


def key_selection_bytes(
    scheduler: SchedulerConfig, model: ModelConfig, max_model_len: int, num_threads: int
) -> int:
    """Return the most memory that XAttention's estimate and choice of keys take in bytes.

    Each thread has the queries of a block as rows, and their scores; then there are the mass of each key
    block for each query block and head, and what each of them sees of the chosen tiles.
    """
    if not _selects_keys(scheduler):
        return 0
    config = scheduler.sparse_attention_config
    size, stride = config.xattention_block_size, config.xattention_stride
    group = model.num_heads // model.num_kv_heads
    num_rows = bounds.MASS_ROWS * -(-size // stride * group // bounds.MASS_ROWS)
    num_columns = bounds.LANES * -(-max_model_len // (stride * bounds.LANES))
    of_thread = num_rows * (stride * model.head_dim + num_columns) * FLOAT32_BYTES
    of_pair = FLOAT64_BYTES + 1 + size // bounds.TILE * bounds.VISIT_BYTES
    return num_threads * of_thread + _block_pairs(scheduler, model, max_model_len) * of_pair


def gpu_key_selection_bytes(scheduler: SchedulerConfig, model: ModelConfig, max_model_len: int) -> int:
    """Return the same of a GPU: some estimates at a time, what is selected, and which tiles are visited."""
    if not _selects_keys(scheduler):
        return 0
    visits = (
        scheduler.max_num_batched_tokens * model.num_heads // bounds.TILE * -(-max_model_len // bounds.TILE)
    )
    config = scheduler.sparse_attention_config
    num_key_blocks = -(-max_model_len // config.xattention_block_size)
    rows = config.xattention_block_size // config.xattention_stride
    of_block = bounds.gpu_estimate_bytes(model.num_heads, num_key_blocks, rows)  # one is estimated at least
    estimates = max(bounds.GPU_ESTIMATE_BYTES, of_block)
    selected = 2 * _block_pairs(scheduler, model, max_model_len)  # of all parts, and put together
    return estimates + (selected + visits) * INT32_BYTES


def _selects_keys(scheduler: SchedulerConfig) -> bool:
    mode = scheduler.sparse_attention_config.mode
    return scheduler.use_sparse_attention and mode == SparseAttentionMode.XATTENTION


def _block_pairs(scheduler: SchedulerConfig, model: ModelConfig, max_model_len: int) -> int:
    """Return the most pairs of a head's query blocks and key blocks that a step has."""
    size, tokens = scheduler.sparse_attention_config.xattention_block_size, scheduler.max_num_batched_tokens
    query_blocks = min(tokens, tokens // size + 2 * scheduler.max_num_seqs)
    return query_blocks * model.num_heads * -(-max_model_len // size)
