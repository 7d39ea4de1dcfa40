"""What tokens requests with penalties have seen, kept where a device chooses their next ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Int64Array
from quire.execution.sampling_table import SamplingTable
from quire.kernels.devices import array_to_device
from quire.kernels.seen_tokens import SeenTokens
from quire.kernels.token_choice import RowPenalties
from quire.step import IntArray

_NOT_COUNTED = -1
_NO_SLOT = -1


@dataclasses.dataclass(slots=True, frozen=True)
class KnownTokens:
    """The tokens of slots as the host knows them; of R rows, the one before may be missing.

    Then it is one that the device has chosen, and counted, last.
    """

    token_ids: IntArray  # [max_num_seqs, more than the largest position] by slot
    times_written: Int64Array  # [R] differs if a slot has got other tokens than those sampled for it


class DevicePenalties:
    """Counts the tokens of slots with penalties as they are chosen.

    The device counts what it chooses. What has become of that afterwards, the host knows: where a row is not
    at the token after the last one counted, or its slot was written to, it is counted again.

    Args:
        table: the parameters by slot.
        max_num_seqs: number of slots.
        vocab_size: V.
        max_model_len: maximum number of tokens of a request.
        device: of the logits.
    """

    def __init__(
        self,
        table: SamplingTable,
        max_num_seqs: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._table = table
        self._device = device
        self._seen = SeenTokens(max_num_seqs, vocab_size, max_model_len, device)
        self._num_counted: Int64Array = np.full(max_num_seqs, _NOT_COUNTED, dtype=np.int64)
        self._times_written: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def of_rows(
        self,
        slots: Int64Array,
        positions: Int64Array,
        is_of_host: BoolArray,
        known: KnownTokens,
    ) -> RowPenalties | None:
        """Return what rows are penalized by; None: nothing.

        Args:
            slots: [R] the slot of each row; those of rows that are not the host's are distinct.
            positions: [R] absolute index of the token to choose.
            is_of_host: [R] rows that are left to the host.
            known: of the rows.
        """
        is_penalized = self._table.is_penalized(slots)
        if not is_penalized.any():
            return None
        self._num_counted[slots[is_penalized & is_of_host]] = _NOT_COUNTED
        counted = is_penalized & ~is_of_host
        if not counted.any():
            return None
        is_current = self._num_counted[slots] == positions
        is_current &= self._times_written[slots] == known.times_written
        for row in np.flatnonzero(counted & ~is_current).tolist():
            self._count_again(int(slots[row]), known.token_ids[slots[row], : positions[row]])
        self._num_counted[slots[counted]] = positions[counted] + 1
        self._times_written[slots[counted]] = known.times_written[counted]
        seen_of_row = array_to_device(np.where(counted, slots, _NO_SLOT), self._device)
        numbers = array_to_device(self._table.penalties_of(slots), self._device)
        return RowPenalties(self._seen.counts, seen_of_row, *numbers)

    def add(self, penalties: RowPenalties, token_ids: torch.Tensor) -> None:
        """Count the tokens [R] int64 that have been chosen after `penalties`."""
        self._seen.add(penalties.seen_of_row, token_ids)

    def _count_again(self, slot: int, token_ids: IntArray) -> None:
        num_prompt_tokens = int(self._table.num_prompt_tokens[slot])
        self._seen.open(slot, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
