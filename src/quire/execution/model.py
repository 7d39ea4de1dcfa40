"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire.execution.arrays import Int64Array
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.interface import KernelSet
from quire.models.config import ModelConfig
from quire.models.decoder import LayerHook


class StepModel(Protocol):
    """Computes one step, on each of the ranks that do so together."""

    def forward(self, token_ids: torch.Tensor, kv: Sequence[KVLayer], batch: AttentionBatch) -> torch.Tensor:
        """See `Decoder.forward`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""

    def agree(self, *, is_captured: bool) -> bool:
        """Return whether all ranks have captured the step; each says whether it has, and waits for others."""


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
        kv: Sequence[KVLayer],
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""

    def whole_step(
        self, batch: AttentionBatch, logit_rows: Int64Array | None
    ) -> AbstractContextManager[StepModel]:
        """Return what computes a step of `batch`, and the logits of some of its tokens; None: of all.

        Other ranks are told of the step as a whole, so that it can be captured and replayed: each of them has
        `StepGraphs` of its own, which do the same with the same batches.
        """

    def reserve(self, num_tokens: int) -> None:
        """See `Decoder.reserve`; of all ranks."""

    def compile_only(self) -> AbstractContextManager[None] | None:
        """See `KernelSet.compile_only`; of all ranks."""
