"""Steps before the first request, so that the kernels of a device are compiled by then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.devices import HostCopy, to_device
from quire.kernels.token_choice import RowDraws
from quire.kv.paged_cache import PagedAttentionCache

if TYPE_CHECKING:
    from quire.execution.model_runner import Model

# A decode step, a few tokens and a chunk of a prompt: kernels have a kind of tiles for each.
LENGTHS = (1, 40, 300)


@torch.inference_mode()
def warm_up(model: Model, kv_cache: PagedAttentionCache, max_model_len: int) -> None:
    """Compute made-up prompts, choose tokens after them, and wait for that.

    Args:
        model: of the engine.
        kv_cache: what its blocks hold is overwritten.
        max_model_len: maximum number of tokens of a prompt.
    """
    device = model.kernels.device
    most = min(max_model_len, kv_cache.num_blocks * kv_cache.block_size)
    for length in sorted({min(length, most) for length in LENGTHS}):
        table = np.arange(-(-length // kv_cache.block_size))
        batch = AttentionBatch.build(np.zeros(1), np.array([length]), table[None], kv_cache.block_size)
        token_ids = to_device(torch.zeros(length, dtype=torch.int64), device)
        logits = model.logits(model.forward(token_ids, kv_cache, batch)[:1])
        if model.kernels.token_choice is not None:
            numbers = torch.tensor([[1.0], [0.9], [0.0], [0.5]], dtype=torch.float64)
            temperature, top_p, min_p, uniforms = to_device(numbers, device)
            top_k = torch.full_like(temperature, logits.shape[1], dtype=torch.int64)
            draws = RowDraws(temperature, top_k, top_p, min_p, uniforms)
            logits = model.kernels.token_choice.choose(logits, draws)[1]
        HostCopy(logits).wait()
