"""What the runner needs of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.interface import KernelSet
from quire.kv.paged_cache import PagedAttentionCache
from quire.models.config import ModelConfig
from quire.models.decoder import LayerHook


class Model(Protocol):
    """A `Decoder`, or what several ranks compute together as one."""

    @property
    def config(self) -> ModelConfig:
        """The model's numbers."""

    @property
    def kernels(self) -> KernelSet:
        """What computes everything that is not a matrix product."""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: PagedAttentionCache,
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""

    def reserve(self, num_tokens: int) -> None:
        """See `Decoder.reserve`."""

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`; of all ranks."""
