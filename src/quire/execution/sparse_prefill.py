"""Which keys the tokens of prompts leave out, step by step: TRISHAPE and XAttention (Xu et al. 2025)."""

from __future__ import annotations

import numpy as np

from quire.config import SparseAttentionConfig, SparseAttentionMode
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.step import Int64Array


class SparsePrefill:
    """Applies a `SparseAttentionConfig` to the chunks of a step.

    Arguments of the methods are [S]: what is computed of each sequence before the step, how many tokens the
    step computes, and how many its prompt has. Tokens after the prompt see all keys.

    Args:
        config: which keys are left out.
        block_size: tokens per KV block.
    """

    def __init__(self, config: SparseAttentionConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size

    def skipped_keys(
        self, num_computed: Int64Array, num_tokens: Int64Array, num_prompt: Int64Array
    ) -> SkippedKeys | None:
        """Return the keys between those at the start and the recent ones; None if no sequence skips any.

        A chunk skips them if at least `num_last_dense_tokens_in_prefill` tokens of the prompt follow it.
        """
        config = self._config
        if config.mode != SparseAttentionMode.TRISHAPE:
            return None
        num_left = num_prompt - num_computed - num_tokens
        full_blocks = num_computed // self._block_size * self._block_size
        start = np.full_like(num_computed, config.num_retained_start_tokens_in_cache)
        end = full_blocks - config.num_retained_recent_tokens_in_cache
        end = np.where(num_left >= config.num_last_dense_tokens_in_prefill, end, 0)
        return SkippedKeys(start, end) if (end > start).any() else None

    def key_selection(
        self, num_computed: Int64Array, num_tokens: Int64Array, num_prompt: Int64Array
    ) -> KeySelection | None:
        """Return which tokens select their keys; None if none does.

        Of the chunk that ends a prompt, query blocks that have one of the last
        `num_last_dense_tokens_in_prefill` tokens see all keys; so does every earlier chunk that reaches into
        these tokens.
        """
        config = self._config
        if config.mode != SparseAttentionMode.XATTENTION or not config.xattention_threshold:
            return None
        size = config.xattention_block_size
        chunk_end = num_computed + num_tokens
        num_dense = config.num_last_dense_tokens_in_prefill
        dense_from = np.maximum(num_prompt - num_dense, 0)
        end_of_sparse_blocks = dense_from // size * size if num_dense else num_prompt
        end = np.where(chunk_end <= dense_from, chunk_end, 0)
        end = np.where(chunk_end >= num_prompt, end_of_sparse_blocks, end)
        if not (end > num_computed).any():
            return None
        return KeySelection(end, config.xattention_threshold, size, config.xattention_stride)
