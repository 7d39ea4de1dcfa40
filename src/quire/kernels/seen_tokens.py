"""Which tokens requests have seen, on a device: what penalties need to know there."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.devices import to_device
from quire.step import NO_TOKEN, IntArray

IN_PROMPT = 1 << 30
"""In the count of a token: it is in the prompt, too."""


class SeenTokens:
    """How often each token is in the output of each slot, plus `IN_PROMPT`.

    Args:
        num_slots: N, how many requests are followed.
        vocab_size: V.
        device: where the counts are: N * V * 4 bytes.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)

    def open(self, slot: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        """Begin with a request in place of the one that had the slot before.

        Args:
            slot: from 0 to N - 1.
            prompt_ids: [P] token ids.
            output_ids: [any] those that are known, of a request that goes on.
        """
        counts = self.counts[slot].zero_()
        counts.index_fill_(0, self._on_device(prompt_ids), IN_PROMPT)
        ids = self._on_device(output_ids)
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more token of each row; nobody waits for the device.

        Args:
            slots: [R] int64 on the device; -1: the row is not followed.
            token_ids: [R] int64 on the device; `NO_TOKEN` is not counted.
        """
        is_counted = (slots >= 0) & (token_ids != NO_TOKEN)
        places = torch.where(is_counted, slots * self.counts.shape[1] + token_ids, 0)
        self.counts.view(-1).index_add_(0, places, is_counted.int())

    def _on_device(self, token_ids: IntArray) -> torch.Tensor:
        return to_device(torch.from_numpy(token_ids.astype(np.int64)), self.counts.device)
