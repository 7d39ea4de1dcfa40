"""A rank's part of a step: the same calls on all ranks, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.models.decoder import Decoder, LayerHook
from quire.models.parallel import Communicator
from quire.models.shard import Shard


class RankDecoder:
    """See `quire.execution.model.StepModel`. Token ids and hidden states are rank 0's.

    The ranks compute what they are given, and tell each other nothing: see `LeadingDecoder`.

    Args:
        decoder: of this rank.
        communicator: likewise.
        shard: this rank.
    """

    def __init__(self, decoder: Decoder, communicator: Communicator, shard: Shard) -> None:
        self._decoder = decoder
        self._communicator = communicator
        self._is_first = shard.rank == 0

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: Sequence[KVLayer],
        batch: AttentionBatch,
        *,
        hook: LayerHook | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`; `token_ids` [T] are overwritten with rank 0's."""
        self._communicator.broadcast(token_ids)
        return self._decoder.forward(token_ids, kv, batch, hook=hook)

    def logits(self, hidden: torch.Tensor, num_largest: torch.Tensor | int | None = None) -> torch.Tensor:
        """See `Decoder.logits` on rank 0; others return nothing, and keep nothing of what they give to it.

        Args:
            hidden: [R, hidden], contiguous; overwritten with rank 0's.
            num_largest: None: all logits are computed.
        """
        self._communicator.broadcast(hidden)
        if self._is_first:
            return self._decoder.logits(hidden)
        assert self._decoder.output is not None
        self._decoder.output(hidden)
        return hidden.new_empty(0)

    def agree(self, *, is_captured: bool) -> bool:
        """Return whether all ranks have captured a step; the host waits for them.

        NCCL requires that an exchange is part of a capture on all ranks or on none ("Using NCCL with CUDA
        Graphs" in its guide).
        """
        own = torch.tensor([is_captured], dtype=torch.uint8, device=self._decoder.kernels.device)
        return all(bool(part.item()) for part in self._communicator.all_gather(own))
