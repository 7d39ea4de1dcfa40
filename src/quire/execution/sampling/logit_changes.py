"""What the constraints and grammars of a step change in its logits, for a device that chooses tokens."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.execution.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.constraints import Constraints
from quire.execution.sampling.table import SamplingTable
from quire.execution.sampling.token_masks import TokenMasks
from quire.kernels.sampling.token_choice import NUM_EDIT_NUMBERS
from quire.step import NO_TOKEN, IntArray

_WORD = 32  # tokens
NO_MASK = -1

NO_EDIT = (-1.0, 0.0, 0.0, float(NO_TOKEN))
"""The numbers of an edit that changes nothing, as in `LogitEdits`."""


@dataclasses.dataclass(slots=True, frozen=True)
class RowMasks:
    """Which tokens R rows may choose."""

    bitmask: IntArray  # [N, V / 32] see `LogitMasks`
    mask_of_row: Int64Array  # [R] the row of `bitmask`; `NO_MASK`: all tokens are allowed


class ChangesOfStep:
    """Collects the changes of R rows.

    Args:
        masks: of the rows' grammars.
        num_rows: R.
        vocab_size: V.
    """

    def __init__(self, masks: TokenMasks | None, num_rows: int, vocab_size: int) -> None:
        self._words = num_mask_words(vocab_size)
        self._mask_of_row: Int64Array = np.full(num_rows, NO_MASK, dtype=np.int64)
        self._bitmasks: list[IntArray] = []
        self._num_masks = 0
        if masks is not None:
            self._mask_of_row[:] = masks.mask_of_position
            self._bitmasks.append(np.ascontiguousarray(masks.bitmask[:, : self._words]))
            self._num_masks = len(masks.bitmask)
        self._edits: list[Float64Array] = []

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
        self._edit(row, token_ids, biases)

    def ban(self, row: int, token_ids: Int64Array, after: Int64Array | int = NO_TOKEN) -> None:
        """Forbid some tokens of a row, each if `after` is the row's last token, or `NO_TOKEN`."""
        self._edit(row, token_ids, -np.inf, after)

    def _edit(
        self,
        row: int,
        token_ids: Int64Array,
        added: Float32Array | float,
        after: Int64Array | int = NO_TOKEN,
    ) -> None:
        if len(token_ids):
            edits = np.empty((NUM_EDIT_NUMBERS, len(token_ids)))
            edits[0], edits[1], edits[2], edits[3] = row, token_ids, added, after
            self._edits.append(edits)

    @property
    def is_masked(self) -> BoolArray:
        """Which rows choose among some tokens only, [R]."""
        masked: BoolArray = self._mask_of_row != NO_MASK
        return masked

    @property
    def masks(self) -> RowMasks | None:
        """Which tokens may be chosen; None: all."""
        if not self._bitmasks:
            return None
        bitmask = self._bitmasks[0] if len(self._bitmasks) == 1 else np.concatenate(self._bitmasks)
        return RowMasks(bitmask, self._mask_of_row)

    @property
    def edits(self) -> Float64Array | None:
        """What is added to single logits, [NUM_EDIT_NUMBERS, E], see `LogitEdits`; None: nothing."""
        return np.concatenate(self._edits, axis=1) if self._edits else None


def num_mask_words(vocab_size: int) -> int:
    """Return how many words say which tokens are allowed."""
    return -(-vocab_size // _WORD)


def changes_of_step(
    table: SamplingTable,
    slots: Int64Array,
    positions: Int64Array,
    masks: TokenMasks | None,
    known: KnownTokens,
    *,
    vocab_size: int,
) -> ChangesOfStep | None:
    """Return what a device changes before it chooses; None: nothing.

    Args:
        table: the parameters by slot.
        slots: [R] the slot of each row.
        positions: [R] absolute index of the token to choose.
        masks: which tokens the rows' grammars allow.
        known: of the tokens before.
        vocab_size: V.
    """
    constrained = np.flatnonzero(table.is_constrained(slots, positions)).tolist()
    if masks is None and not constrained:
        return None
    changes = ChangesOfStep(masks, len(slots), vocab_size)
    for row in constrained:
        slot = slots[row]
        constraints = table.constraints[slot]
        assert constraints is not None
        if constraints.allows_few:
            changes.allow_only(row, constraints.allowed_ids)
        output = known.token_ids[slot, table.num_prompt_tokens[slot] : positions[row]]
        changes.ban(row, constraints.banned_ids(len(output)))
        _ban_completions(changes, row, constraints, output, lacks_last=bool(known.is_missing[row]))
        changes.bias(row, *constraints.biases)
    return changes


def _ban_completions(
    changes: ChangesOfStep, row: int, constraints: Constraints, output: IntArray, *, lacks_last: bool
) -> None:
    if lacks_last:
        before, last = constraints.possible_completions(output[:-1])
        changes.ban(row, last, before)
    else:
        changes.ban(row, constraints.banned_completions(output))
