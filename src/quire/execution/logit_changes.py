"""What the constraints and grammars of a step change in its logits, for a device that chooses tokens."""

from __future__ import annotations

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Float32Array, Int64Array
from quire.execution.sampling_table import SamplingTable
from quire.execution.token_masks import TokenMasks
from quire.kernels.devices import array_to_device
from quire.kernels.token_choice import LogitChanges
from quire.step import IntArray

_WORD = 32  # tokens
_NO_MASK = -1


class ChangesOfStep:
    """Collects the changes of R rows.

    Args:
        masks: of the rows' grammars.
        is_of_host: [R] rows that nothing is to be changed in.
        vocab_size: V.
    """

    def __init__(self, masks: TokenMasks | None, is_of_host: BoolArray, vocab_size: int) -> None:
        self._words = -(-vocab_size // _WORD)
        self._mask_of_row: Int64Array = np.full(len(is_of_host), _NO_MASK, dtype=np.int64)
        self._bitmasks: list[IntArray] = []
        self._num_masks = 0
        if masks is not None:
            self._mask_of_row[:] = np.where(is_of_host, _NO_MASK, masks.mask_of_position)
            self._bitmasks.append(np.ascontiguousarray(masks.bitmask[:, : self._words]))
            self._num_masks = len(masks.bitmask)
        self._biases: list[tuple[int, Int64Array, Float32Array]] = []
        self._bans: list[tuple[int, Int64Array]] = []

    def allow_only(self, row: int, token_ids: Int64Array) -> None:
        """Forbid a row all other tokens, beside those that its grammar forbids."""
        allowed = np.zeros(self._words * _WORD, dtype=np.uint8)
        allowed[token_ids] = 1
        words = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
        if self._mask_of_row[row] != _NO_MASK:
            words &= self._bitmasks[0][self._mask_of_row[row]]
        self._bitmasks.append(words[None])
        self._mask_of_row[row] = self._num_masks
        self._num_masks += 1

    def bias(self, row: int, token_ids: Int64Array, biases: Float32Array) -> None:
        """Add to the logits of some tokens of a row, each once."""
        self._biases.append((row, token_ids, biases))

    def ban(self, row: int, token_ids: Int64Array) -> None:
        """Forbid some tokens of a row."""
        self._bans.append((row, token_ids))

    @property
    def is_masked(self) -> BoolArray:
        """Which rows choose among some tokens only, [R]."""
        masked: BoolArray = self._mask_of_row != _NO_MASK
        return masked

    def on(self, device: torch.device) -> LogitChanges:
        """Return the changes on a device."""

        def rows(pairs: list[tuple[int, Int64Array]]) -> Int64Array:
            return np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs]).astype(np.int64)

        def joined(parts: list[Int64Array]) -> Int64Array:
            return np.concatenate([np.empty(0, dtype=np.int64), *parts])

        biased = [(row, ids) for row, ids, _ in self._biases]
        empty = np.empty((0, self._words), dtype=np.int32)
        arrays = (
            np.concatenate([empty, *self._bitmasks]),
            self._mask_of_row,
            rows(biased),
            joined([ids for _, ids in biased]),
            np.concatenate([np.empty(0, dtype=np.float32), *(values for *_, values in self._biases)]),
            rows(self._bans),
            joined([ids for _, ids in self._bans]),
        )
        return LogitChanges(*(array_to_device(array, device) for array in arrays))


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
