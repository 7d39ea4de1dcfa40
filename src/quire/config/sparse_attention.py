"""Sparse attention for prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from quire.config.fields import (
    Choice,
    SettableConfig,
    check_limits,
    knob,
    refuse_partial_blocks,
    settable_config,
)
from quire.limits import NonNegativeInt


class SparseAttentionMode(Choice):
    """Sparse attention pattern."""

    TRISHAPE = "trishape"  # all tokens of a chunk see the first and the most recent keys
    XATTENTION = "xattention"  # each head selects the key blocks that matter to a block of queries


@settable_config(kw_only=False)
class SparseAttentionConfig(SettableConfig):
    """Which keys the tokens of a prompt leave out: see `SchedulerConfig.use_sparse_attention`.

    The names beginning with `num_retained` belong to the mode trishape, those with `xattention` to the other.
    """

    mode: SparseAttentionMode = knob(
        default=SparseAttentionMode.TRISHAPE,
        help="Keys that a prompt chunk attends to: trishape (the first and the most recent keys, and the "
        "chunk), or xattention (the key blocks that each head estimates to matter).",
    )
    num_last_dense_tokens_in_prefill: NonNegativeInt = knob(
        default=100, unit="tokens", help="Number of tokens at the end of a prompt that see all keys."
    )
    num_retained_start_tokens_in_cache: NonNegativeInt = knob(
        default=128,
        unit="tokens",
        help="Number of tokens at the start of a prompt that all others see; a multiple of the block size.",
    )
    num_retained_recent_tokens_in_cache: NonNegativeInt = knob(
        default=1920,
        unit="tokens",
        help="Number of tokens before a chunk that the chunk sees; a multiple of the block size.",
    )
    xattention_threshold: Annotated[float, Ge(0), Le(1)] = knob(
        default=0.8,
        unit="fraction",
        help="Fraction of the estimated attention of a block of queries that the selected keys make up. "
        "0: all keys are seen.",
    )
    xattention_block_size: Literal[64, 128, 256] = knob(
        default=64, unit="tokens", help="Number of tokens per block of queries and of keys."
    )
    xattention_stride: Literal[4, 8, 16, 32] = knob(
        default=8,
        unit="tokens",
        help="Number of queries and of keys that the estimate takes together: the larger, the cheaper and "
        "the less exact.",
    )

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` for the first value outside its limits."""
        check_limits(self)

    def refuse_block_size(self, block_size: int) -> None:
        """Raise `ConfigError` if what trishape retains is no multiple of `block_size` tokens."""
        if self.mode == SparseAttentionMode.TRISHAPE:
            names = ("num_retained_start_tokens_in_cache", "num_retained_recent_tokens_in_cache")
            refuse_partial_blocks(self, names, block_size)
