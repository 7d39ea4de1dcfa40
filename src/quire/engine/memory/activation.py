"""Memory for the buffers and temporary tensors of steps, estimated from the configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quire.engine.memory.eviction import eviction_bytes
from quire.kernels import bounds
from quire.kernels.size_classes import wide_size_class
from quire.models.config import DTYPE_BYTES
from quire.models.layer import StepSizes

if TYPE_CHECKING:
    from quire.config import SchedulerConfig
    from quire.models.config import ModelConfig

FLOAT32_BYTES = 4
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

    Counts the buffers that a model keeps (`quire.models.decoder.Workspace`), and what is alive beside them at
    the widest point of a step of `max_num_batched_tokens` tokens: inside a sub-layer, as that says, or in the
    sampler with `max_num_seqs` rows and `num_drafts` more, whichever is most. `model` is
    that of one of `num_ranks` ranks, which also hold what they exchange; each computes on `num_threads`. With
    `on_gpu`, only what is in the GPU's memory counts, with the angles of all positions.
    """
    scheduler = scheduler.with_step_tokens()  # an engine's are decided already
    tokens = scheduler.max_num_batched_tokens
    if on_gpu:
        tokens = wide_size_class(tokens)  # recorded steps are rounded up
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
    kept += logit_rows * model.vocab_size * FLOAT32_BYTES
    if num_ranks > 1:
        kept += _exchange_bytes(model, tokens, places, num_ranks) + on_gpu * bounds.NCCL_BYTES
    kept += eviction_bytes(scheduler, model, max_model_len, on_gpu=on_gpu)
    if on_gpu:
        count_bytes = 2 if max_model_len < bounds.SHORT_COUNTS_END else 4
        kept += scheduler.max_num_seqs * model.vocab_size * count_bytes  # of tokens, for penalties
        kept += max_model_len * sum(rope.rotary_dim for rope in model.ropes) * FLOAT32_BYTES
    if on_gpu or is_native:
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
