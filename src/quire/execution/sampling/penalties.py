"""What tokens requests with penalties have seen, kept where their next ones are chosen."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.execution.arrays import Float64Array, Int64Array
from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.table import SamplingTable
from quire.kernels.devices.device import array_to_device
from quire.kernels.sampling.seen_tokens import SeenTokens
from quire.kernels.sampling.token_choice import RowPenalties
from quire.step import NO_TOKEN, IntArray

_NOT_COUNTED = -1
_NO_SLOT = -1

NO_PENALTIES = (_NO_SLOT, 1.0, 0.0, 0.0, _NO_SLOT)
"""The numbers of a row without penalties, as in `StepPenalties`."""


@dataclasses.dataclass(slots=True, frozen=True)
class StepPenalties:
    """What the rows of a step are penalized by, and for which slots their tokens are counted."""

    numbers: Float64Array
    """[5, R] the slot that has seen tokens, -1: no penalties; the penalties for repetition, frequency and
    presence; the slot that the chosen token is counted for, -1: none."""
    drafts: Int64Array | None  # see `RowPenalties`


class Penalties:
    """Counts the tokens of slots with penalties as they are chosen, on the device that chooses them.

    What is chosen is counted at once, but for slots with drafts. What has become of that afterwards, the host
    knows: what was not counted is so by the next time, and where more was counted than there is, or its slot
    was written to, a slot is counted again.

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
        known: KnownTokens,
    ) -> StepPenalties | None:
        """Return what rows are penalized by; None: nothing.

        Args:
            slots: [R] the slot of each row; rows of one slot are adjacent, the first of them before its
                drafts, which are known.
            positions: [R] absolute index of the token to choose.
            known: of the rows.
        """
        counted = self._table.is_penalized(slots)
        if not counted.any():
            return None
        begins_slot = np.ones_like(counted)
        np.not_equal(slots[1:], slots[:-1], out=begins_slot[1:])
        slots_to_count, drafts = np.where(counted, slots, _NO_SLOT), None
        numbers = np.empty((5, len(slots)))
        numbers[0], numbers[1:4] = slots_to_count, self._table.penalties_of(slots)
        firsts = np.flatnonzero(counted & begins_slot)
        self._catch_up(slots[firsts], positions[firsts], known.times_written[firsts], known.token_ids)
        self._num_counted[slots[firsts]] = positions[firsts] + 1
        if not begins_slot.all():
            # Which of the drafts count is known to the host, and counted by the next time.
            num_drafts = positions - positions[begins_slot][np.cumsum(begins_slot) - 1]  # before each row
            num_drafts[~counted] = 0
            has_drafts = counted & np.isin(slots, slots[num_drafts > 0])
            slots_to_count[has_drafts] = _NO_SLOT
            self._num_counted[slots[has_drafts]] = positions[has_drafts] - num_drafts[has_drafts]
            if has_drafts.any():
                drafts = self._drafts(slots, positions, num_drafts, known.token_ids)
        numbers[4] = slots_to_count
        return StepPenalties(numbers, drafts)

    def on_device(self, numbers: torch.Tensor, drafts: torch.Tensor | None = None) -> RowPenalties:
        """Return what rows are penalized by; the arguments are those of `StepPenalties`, on the device."""
        repetition, frequency, presence = numbers[1:4].float()
        slots = numbers[0].long()
        return RowPenalties(self._seen.counts, slots, repetition, frequency, presence, drafts)

    def add(self, numbers: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count the tokens [R] int64 that have been chosen after penalties; see `on_device`."""
        self._seen.add(numbers[-1].long(), token_ids)

    @staticmethod
    def _drafts(
        slots: Int64Array, positions: Int64Array, num_drafts: Int64Array, token_ids: IntArray
    ) -> Int64Array:
        """Return the drafts before each row, [R, the most of them], the last one first."""
        places = positions[:, None] - 1 - np.arange(num_drafts.max())
        is_draft = places >= (positions - num_drafts)[:, None]
        drafts = token_ids[slots[:, None], np.maximum(places, 0)].astype(np.int64)
        return np.where(is_draft, drafts, NO_TOKEN)

    def _catch_up(
        self, slots: Int64Array, positions: Int64Array, times_written: Int64Array, token_ids: IntArray
    ) -> None:
        """Have the tokens before each position counted, and no others."""
        num_counted = self._num_counted[slots]
        num_new = positions - num_counted
        is_same = (self._times_written[slots] == times_written) & (num_new >= 0)
        is_same &= num_counted != _NOT_COUNTED
        if not is_same.all():
            for slot, end in zip(slots[~is_same].tolist(), positions[~is_same].tolist(), strict=True):
                self._count_again(slot, token_ids[slot, :end])
            num_new[~is_same] = 0
        if num_new.any():
            rows = np.repeat(slots, num_new)
            ends = np.cumsum(num_new)
            places = np.arange(len(rows)) - np.repeat(ends - num_new - num_counted, num_new)
            new = token_ids[rows, places].astype(np.int64)
            self._seen.add(array_to_device(rows, self._device), array_to_device(new, self._device))
        self._times_written[slots] = times_written

    def _count_again(self, slot: int, token_ids: IntArray) -> None:
        num_prompt_tokens = int(self._table.num_prompt_tokens[slot])
        self._seen.open(slot, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
