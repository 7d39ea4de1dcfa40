"""Attention in which each token of a prompt sees all others, or those within a window: that of encoders.

Nothing is kept of a prompt, which is computed in one step: keys and values are read where they are projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from quire.errors import ModelError
from quire.models.layer import LayerLoader, Step, StepSizes, SubLayer
from quire.models.layers.attention import Attention, AttentionConfig

if TYPE_CHECKING:
    import torch

    from quire.kernels.attention.batch import AttentionBatch
    from quire.kernels.attention.kv_layer import KVLayer

_INT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoSidedAttentionConfig(AttentionConfig):
    """The numbers of one layer's attention. With a window, a token sees `window - 1` others on each side."""

    @property
    @override
    def kv(self) -> None:
        return None

    @property
    @override
    def is_causal(self) -> bool:
        return False

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows_of_tokens = step.tokens * min(step.scheduler.max_num_seqs, step.tokens) * _INT32_BYTES
        return AttentionConfig.peak_bytes(self, step) + rows_of_tokens

    @override
    def load(self, loader: LayerLoader) -> SubLayer:
        return TwoSidedAttention(self, loader)


class TwoSidedAttention(Attention):
    """Two-sided attention with its weights.

    Raises:
        ModelError: the kernels cannot compute it.
    """

    def __init__(self, whole: TwoSidedAttentionConfig, loader: LayerLoader) -> None:
        if not loader.kernels.is_two_sided:
            raise ModelError(
                f"{loader.model.architecture} has attention to later tokens, which the "
                f"{loader.kernels.name} kernels do not compute; set EngineConfig.device to 'cpu'"
            )
        super().__init__(whole, loader)

    @override
    def _keys_and_values(
        self, step: Step, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[KVLayer, AttentionBatch]:
        batch = step.batches[0].over_rows()
        return batch.kv_of_rows(buffers["qkv"], self._heads), batch
