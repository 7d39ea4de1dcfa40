"""What tokens requests with penalties have seen, kept where their next ones are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.table import SamplingTable
from quire.kernels.arrays import Float64Array
from quire.kernels.devices.device import array_to_device
from quire.kernels.sampling.seen_tokens import HostSeenTokens, SeenTokens
from quire.kernels.sampling.token_choice import RowPenalties
from quire.step import NO_TOKEN, Int64Array, IntArray

_NOT_COUNTED = np.iinfo(np.int64).max  # more than there are tokens
_NO_SLOT = -1


@dataclasses.dataclass(slots=True, frozen=True)
class StepPenalties:
    """What the rows of a step are penalized by, and for which slots their tokens are counted."""

    numbers: Float64Array
    """[5, R] the slot that has seen tokens, -1: no penalties; the penalties for repetition, frequency and
    presence; the slot that the chosen token is counted for, -1: none."""
    drafts: Int64Array | None  # see `RowPenalties`


class Penalties:
    """Counts the tokens of slots with penalties as they are chosen, on the device that chooses them.

    Chosen tokens are counted at once, except those of slots with drafts. By the next step, the host adds what
    was not counted; a slot is counted again where too much was counted, or where it was written to.

    Args:
        table: the parameters by slot.
        max_num_seqs: number of slots.
        vocab_size: V.
        max_model_len: maximum number of tokens of a request.
        device: of the logits.
        is_on_host: whether the host chooses, and no device.
    """

    def __init__(
        self,
        table: SamplingTable,
        max_num_seqs: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        *,
        is_on_host: bool = False,
    ) -> None:
        self._table = table
        self._device = device
        self._seen: SeenTokens | HostSeenTokens = (
            HostSeenTokens(table.seen)
            if is_on_host
            else SeenTokens(max_num_seqs, vocab_size, max_model_len, device)
        )
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
        numbers, drafts = self._table.penalties_of(slots), None
        counted = self._table.is_penalized(slots)
        if not np.count_nonzero(counted):
            return None
        num_counted = self._num_counted[slots]
        is_stale = (num_counted != positions) | (self._times_written[slots] != known.times_written)
        if not np.count_nonzero(is_stale & counted):  # of drafts, all rows but the first are
            self._num_counted[slots] = num_counted + counted
            return StepPenalties(numbers, None)
        begins_slot = np.ones(len(slots), dtype=np.bool_)
        np.not_equal(slots[1:], slots[:-1], out=begins_slot[1:])
        firsts = (counted & begins_slot).nonzero()[0]
        first_slots, ends = slots[firsts], positions[firsts]
        self._catch_up(first_slots, ends, known.times_written[firsts], known.token_ids)
        self._num_counted[first_slots] = ends + 1
        if np.count_nonzero(begins_slot) < len(slots):
            # Which of the drafts count is known to the host, and counted by the next time.
            num_drafts = positions - positions[begins_slot][np.cumsum(begins_slot) - 1]  # before each row
            num_drafts[~counted] = 0
            has_drafts = num_drafts > 0
            has_drafts[:-1] |= has_drafts[1:]  # the row before them, too
            if np.count_nonzero(has_drafts):
                numbers[4, has_drafts] = _NO_SLOT
                self._num_counted[slots[has_drafts]] = (positions - num_drafts)[has_drafts]
                drafts = self._drafts(slots, positions, num_drafts, known.token_ids)
        return StepPenalties(numbers, drafts)

    def on_device(self, numbers: Any, drafts: Any = None) -> RowPenalties[Any]:
        """Return what rows are penalized by; the arguments are those of `StepPenalties`, on the device."""
        return self._seen.penalties(numbers, drafts)

    def add(self, numbers: Any, token_ids: torch.Tensor) -> None:
        """Count the tokens [R] int64 that have been chosen after penalties; see `on_device`."""
        self._seen.add(numbers[-1], token_ids)

    @staticmethod
    def _drafts(
        slots: Int64Array, positions: Int64Array, num_drafts: Int64Array, token_ids: IntArray
    ) -> Int64Array:
        """Return the drafts before each row, [R, max drafts], the last one first."""
        places = positions[:, None] - 1 - np.arange(num_drafts.max())
        is_draft = places >= (positions - num_drafts)[:, None]
        drafts = token_ids[slots[:, None], np.maximum(places, 0)].astype(np.int64)
        return np.where(is_draft, drafts, NO_TOKEN)

    def _catch_up(
        self, slots: Int64Array, positions: Int64Array, times_written: Int64Array, token_ids: IntArray
    ) -> None:
        """Count the tokens before each position that are not counted yet, and no others."""
        num_counted = self._num_counted[slots]
        num_new = positions - num_counted
        is_other = (self._times_written[slots] != times_written) | (num_new < 0)
        if np.count_nonzero(is_other):
            for slot, end in zip(slots[is_other].tolist(), positions[is_other].tolist(), strict=True):
                self._count_again(slot, token_ids[slot, :end])
            num_new[is_other] = 0
        if np.count_nonzero(num_new):
            rows = np.repeat(slots, num_new)
            ends = np.cumsum(num_new)
            places = np.arange(len(rows)) - np.repeat(ends - num_new - num_counted, num_new)
            new = token_ids[rows, places].astype(np.int64)
            self._seen.add(array_to_device(rows, self._device), array_to_device(new, self._device))
        self._times_written[slots] = times_written

    def _count_again(self, slot: int, token_ids: IntArray) -> None:
        num_prompt_tokens = int(self._table.num_prompt_tokens[slot])
        self._seen.open(slot, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
