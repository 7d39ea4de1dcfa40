"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.interface import KernelSet
from quire.models.config import ModelConfig
from quire.models.decoder import LayerHook
from quire.models.row_layers import DenseRows
from quire.step import Int64Array


class StepModel(Protocol):
    """Computes one step, on each rank of a tensor-parallel model."""

    def forward(self, token_ids: torch.Tensor, kv: Sequence[KVLayer], batch: AttentionBatch) -> torch.Tensor:
        """See `Decoder.forward`."""

    def logits(self, hidden: torch.Tensor, num_largest: torch.Tensor | int | None = None) -> torch.Tensor:
        """See `Decoder.logits`."""

    def agree(self, *, is_captured: bool) -> bool:
        """Return whether all ranks have captured the step; waits for the answers of all."""


class Model(Protocol):
    """A `Decoder`, on one rank or tensor-parallel on several."""

    @property
    def config(self) -> ModelConfig:
        """The model's numbers."""

    @property
    def row_layers(self) -> Sequence[DenseRows]:
        """What pooled rows go through."""

    @property
    def kernels(self) -> KernelSet:
        """What computes everything that is not a matrix product."""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: Sequence[KVLayer],
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""

    @property
    def finds_largest_logits(self) -> bool:
        """See `Decoder`."""

    def logits(self, hidden: torch.Tensor, num_largest: torch.Tensor | int | None = None) -> torch.Tensor:
        """See `Decoder.logits`."""

    def whole_step(
        self, batch: AttentionBatch, logit_rows: Int64Array | None
    ) -> AbstractContextManager[StepModel]:
        """Return the context of computing a step of `batch` and the logits of some tokens; None: of all.

        The step is sent to other ranks as a whole, so that it can be captured and replayed: each of them has
        `StepGraphs` of its own, which behaves the same for the same batches.
        """

    def reserve(self, num_tokens: int) -> None:
        """See `Decoder.reserve`; of all ranks."""

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`; of all ranks."""
