"""Which tokens requests have seen, counted on a device for penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.kernels.arrays import Float32Array, Float64Array
from quire.kernels.bounds import SHORT_COUNTS_END
from quire.kernels.devices.device import array_to_device
from quire.kernels.sampling.token_choice import RowPenalties
from quire.step import Int64Array, IntArray


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
        self.counts = torch.zeros(num_slots, vocab_size, dtype=dtype, device=device)
        """[N, V] int16 or int32: occurrences in the output, and `in_prompt` added to that."""

    def open(self, slot: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        """Begin with a request in place of the one that had the slot before.

        Args:
            slot: from 0 to N - 1.
            prompt_ids: [P] token ids.
            output_ids: [any] those that are known, of a request that goes on.
        """
        counts = self.counts[slot].zero_()
        counts.index_fill_(0, self._on_device(prompt_ids), in_prompt(counts.dtype))
        ids = self._on_device(output_ids)
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more token of each row, without waiting for the device.

        Args:
            slots: [R] whole numbers on the device; -1: the row is not followed.
            token_ids: [R] int64 on the device; what is no token id, as `NO_TOKEN`, is not counted.
        """
        vocab_size = self.counts.shape[1]
        slots = slots.long()
        is_counted = ((slots | token_ids) >= 0) & (token_ids < vocab_size)  # negative if either is
        places = torch.where(is_counted, slots * vocab_size + token_ids, 0)
        self.counts.view(-1).index_add_(0, places, is_counted.to(self.counts.dtype))

    def penalties(self, numbers: torch.Tensor, drafts: torch.Tensor | None) -> RowPenalties:
        """Return penalties for what was seen.

        Args:
            numbers: [5, R] float64; of these, slots or -1, and the penalties in the order of `RowPenalties`.
            drafts: see `RowPenalties`.
        """
        repetition, frequency, presence = numbers[1:4].float()
        return RowPenalties(self.counts, numbers[0].long(), repetition, frequency, presence, drafts)

    def _on_device(self, token_ids: IntArray) -> torch.Tensor:
        return array_to_device(token_ids.astype(np.int64), self.counts.device)


class SeenIds:
    """What one request has seen, as `SeenTokens` counts it."""

    def __init__(self, prompt_ids: IntArray, output_ids: IntArray) -> None:
        ids = np.unique(np.concatenate((prompt_ids, output_ids)))
        self._num_ids = len(ids)
        self._place_of = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._ids = np.zeros(2 * len(ids) + 64, dtype=np.int64)
        self._times = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: len(ids)] = ids
        self._times[: len(ids)] = np.bincount(np.searchsorted(ids, output_ids), minlength=len(ids))

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = self._num_ids
            self._num_ids += 1
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._times = np.concatenate((self._times, np.zeros_like(self._times)))
            self._ids[place] = token_id
        self._times[place] += 1

    def take_back(self, token_ids: list[int], num_ids: int) -> None:
        """Forget what was added last, when there had been `num_ids` distinct ids."""
        for token_id in token_ids:
            self._times[self._place_of[token_id]] -= 1
        for token_id in self._ids[num_ids : self._num_ids].tolist():
            del self._place_of[token_id]
        self._num_ids = num_ids

    @property
    def ids(self) -> Int64Array:
        """The distinct ids, [D]."""
        return self._ids[: self._num_ids]

    @property
    def times(self) -> Float32Array:
        """How often each of them is in the output, [D]."""
        return self._times[: self._num_ids]


class HostSeenTokens:
    """The same on the host, where looking for what was seen among the whole vocabulary takes long.

    Args:
        of_slot: [N] where the ids are kept; the owner of the list may clear a slot.
    """

    def __init__(self, of_slot: list[SeenIds | None]) -> None:
        self._of_slot: Any = of_slot

    def open(self, slot: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        """See `SeenTokens.open`."""
        self._of_slot[slot] = SeenIds(prompt_ids, output_ids)

    def add(self, slots: Float64Array | torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `SeenTokens.add`."""
        for slot, token_id in zip(map(int, slots.tolist()), token_ids.tolist(), strict=True):
            if slot >= 0 and token_id >= 0:
                self._of_slot[slot].add(token_id)

    def penalties(self, numbers: Float64Array, drafts: Int64Array | None) -> RowPenalties[Any]:
        """See `SeenTokens.penalties`."""
        slots, repetition, frequency, presence, _ = numbers
        return RowPenalties(self._of_slot, slots.astype(np.int64), repetition, frequency, presence, drafts)


def in_prompt(dtype: torch.dtype) -> int:
    """Return what is added to counts of this type for prompts: a power of two above any count."""
    return SHORT_COUNTS_END if dtype == torch.int16 else 1 << 30
