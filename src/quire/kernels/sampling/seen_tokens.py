"""Which tokens requests have seen, on a device: what penalties need to know there."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.bounds import SHORT_COUNTS_END
from quire.kernels.devices.device import HOST, array_to_device
from quire.step import IntArray


class SeenTokens:
    """How often each token is in the output of each slot, and whether it is in the prompt.

    Args:
        num_slots: N, how many requests are followed.
        vocab_size: V.
        max_model_len: most tokens of a request; numbers are two bytes each if that is small enough for them.
        device: where the numbers are.
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        dtype = torch.int16 if max_model_len < SHORT_COUNTS_END else torch.int32
        if device == HOST:  # numpy takes memory slot by slot, as requests with penalties write to it
            zeros = np.zeros((num_slots, vocab_size), dtype=np.int16 if dtype == torch.int16 else np.int32)
            counts = torch.from_numpy(zeros)
        else:
            counts = torch.zeros(num_slots, vocab_size, dtype=dtype, device=device)
        self.counts = counts
        """[N, V] int16 or int32: occurrences in the output, and `in_prompt` added to that."""

    @property
    def in_prompt(self) -> int:
        """A power of two, more than any number of occurrences."""
        return in_prompt(self.counts.dtype)

    def open(self, slot: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        """Begin with a request in place of the one that had the slot before.

        Args:
            slot: from 0 to N - 1.
            prompt_ids: [P] token ids.
            output_ids: [any] those that are known, of a request that goes on.
        """
        counts = self.counts[slot].zero_()
        counts.index_fill_(0, self._on_device(prompt_ids), self.in_prompt)
        ids = self._on_device(output_ids)
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more token of each row; nobody waits for the device.

        Args:
            slots: [R] int64 on the device; -1: the row is not followed.
            token_ids: [R] int64 on the device; what is no token id, as `NO_TOKEN`, is not counted.
        """
        vocab_size = self.counts.shape[1]
        is_counted = ((slots | token_ids) >= 0) & (token_ids < vocab_size)  # negative if either is
        places = torch.where(is_counted, slots * vocab_size + token_ids, 0)
        self.counts.view(-1).index_add_(0, places, is_counted.to(self.counts.dtype))

    def _on_device(self, token_ids: IntArray) -> torch.Tensor:
        return array_to_device(token_ids.astype(np.int64), self.counts.device)


def in_prompt(dtype: torch.dtype) -> int:
    """Return what is added to the counts of this type of tokens that are in the prompt."""
    return SHORT_COUNTS_END if dtype == torch.int16 else 1 << 30
