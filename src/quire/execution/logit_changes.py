"""What the constraints and grammars of a step change in its logits, for a device that chooses tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Float32Array, Int64Array
from quire.execution.sampling_table import SamplingTable
from quire.execution.token_masks import TokenMasks
from quire.kernels.devices import array_to_device
from quire.kernels.token_choice import LogitChanges
from quire.step import IntArray

_WORD = 32  # tokens
NO_MASK = -1


@dataclasses.dataclass(slots=True, frozen=True)
class RowMasks:
    """Which tokens R rows may choose."""

    bitmask: IntArray  # [N, V / 32] see `LogitChanges`
    mask_of_row: Int64Array  # [R] the row of `bitmask`; `NO_MASK`: all tokens are allowed


class ChangesOfStep:
    """Collects the changes of R rows.

    Args:
        masks: of the rows' grammars.
        is_of_host: [R] rows that nothing is to be changed in.
        vocab_size: V.
    """

    def __init__(self, masks: TokenMasks | None, is_of_host: BoolArray, vocab_size: int) -> None:
        self._words = num_mask_words(vocab_size)
        self._mask_of_row: Int64Array = np.full(len(is_of_host), NO_MASK, dtype=np.int64)
        self._bitmasks: list[IntArray] = []
        self._num_masks = 0
        if masks is not None:
            self._mask_of_row[:] = np.where(is_of_host, NO_MASK, masks.mask_of_position)
            self._bitmasks.append(np.ascontiguousarray(masks.bitmask[:, : self._words]))
            self._num_masks = len(masks.bitmask)
        self._biases: list[tuple[int, Int64Array, Float32Array]] = []
        self._bans: list[tuple[int, Int64Array]] = []

    def allow_only(self, row: int, token_ids: Int64Array) -> None:
        """Forbid a row all other tokens, beside those that its grammar forbids."""
        allowed = np.zeros(self._words * _WORD, dtype=np.uint8)
        allowed[token_ids] = 1
        words = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
        if self._mask_of_row[row] != NO_MASK:
            words &= self._bitmasks[0][self._mask_of_row[row]]
        self._bitmasks.append(words[None])
        self._mask_of_row[row] = self._num_masks
        self._num_masks += 1

    def bias(self, row: int, token_ids: Int64Array, biases: Float32Array) -> None:
        """Add to the logits of some tokens of a row, each once."""
        if len(token_ids):
            self._biases.append((row, token_ids, biases))

    def ban(self, row: int, token_ids: Int64Array) -> None:
        """Forbid some tokens of a row."""
        if len(token_ids):
            self._bans.append((row, token_ids))

    @property
    def is_masked(self) -> BoolArray:
        """Which rows choose among some tokens only, [R]."""
        masked: BoolArray = self._mask_of_row != NO_MASK
        return masked

    @property
    def masks(self) -> RowMasks | None:
        """The changes, if they are no others than masks."""
        if self._biases or self._bans:
            return None
        return RowMasks(self._joined_bitmasks(), self._mask_of_row)

    def _joined_bitmasks(self) -> IntArray:
        if len(self._bitmasks) == 1:
            return self._bitmasks[0]
        return np.concatenate([np.empty((0, self._words), dtype=np.int32), *self._bitmasks])

    def on(self, device: torch.device) -> LogitChanges:
        """Return the changes on a device."""

        def rows(pairs: list[tuple[int, Int64Array]]) -> Int64Array:
            return np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs]).astype(np.int64)

        def joined(parts: list[Int64Array]) -> Int64Array:
            return np.concatenate([np.empty(0, dtype=np.int64), *parts])

        biased = [(row, ids) for row, ids, _ in self._biases]
        arrays = (
            self._joined_bitmasks(),
            self._mask_of_row,
            rows(biased),
            joined([ids for _, ids in biased]),
            np.concatenate([np.empty(0, dtype=np.float32), *(values for *_, values in self._biases)]),
            rows(self._bans),
            joined([ids for _, ids in self._bans]),
        )
        return LogitChanges(*(array_to_device(array, device) for array in arrays))


def num_mask_words(vocab_size: int) -> int:
    """Return how many words say which tokens are allowed."""
    return -(-vocab_size // _WORD)


def changes_of_step(
    table: SamplingTable,
    slots: Int64Array,
    positions: Int64Array,
    masks: TokenMasks | None,
    is_of_host: BoolArray,
    *,
    vocab_size: int,
) -> ChangesOfStep | None:
    """Return what a device changes before it chooses; None: nothing.

    Args:
        table: the parameters by slot.
        slots: [R] the slot of each row.
        positions: [R] absolute index of the token to choose.
        masks: which tokens the rows' grammars allow.
        is_of_host: [R] rows that the host chooses for.
        vocab_size: V.
    """
    constrained = np.flatnonzero(table.is_constrained(slots, positions) & ~is_of_host).tolist()
    if masks is None and not constrained:
        return None
    changes = ChangesOfStep(masks, is_of_host, vocab_size)
    for row in constrained:
        constraints = table.constraints[slots[row]]
        assert constraints is not None
        if constraints.allows_few:
            changes.allow_only(row, constraints.allowed_ids)
        changes.ban(row, constraints.banned_ids(int(positions[row] - table.num_prompt_tokens[slots[row]])))
        changes.bias(row, *constraints.biases)
    return changes
