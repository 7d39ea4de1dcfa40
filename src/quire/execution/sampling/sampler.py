"""Choosing the next token of each row from its logits, on the device where these are.

On the host, tokens are known at once. On another device the host does not wait: the last token of each slot
is kept there, where the next step reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.captured_choice import CapturedChoice, ChoiceNumbers, ChoiceTensors
from quire.execution.sampling.constraints import ChangesOfStep, RowMasks, num_mask_words
from quire.execution.sampling.penalties import Penalties, StepPenalties
from quire.execution.sampling.table import CONSTRAINTS, DRAWS, LOGPROBS, PENALTIES, SamplingTable
from quire.execution.sampling.tokens_in_flight import ReportedLogprobs, TokensInFlight
from quire.execution.step_graphs import StepLogits
from quire.kernels.arrays import Float64Array
from quire.kernels.devices.device import array_to_device
from quire.kernels.interface import Capture, KernelSet
from quire.kernels.sampling.token_choice import LogitChanges, LogitEdits, RowDraws
from quire.step import Int64Array

_NO_SLOT = -1


class _RawLogits(NamedTuple):
    """The logits of S rows that report log-probabilities, as the model gave them."""

    rows: Int64Array  # [S] which
    counts: Int64Array  # [S] how many of the likeliest tokens each of them reports
    of_rows: torch.Tensor  # `rows` on the device
    logits: torch.Tensor
    places: torch.Tensor  # [S] rows of `logits`


class Sampler:
    """Samples with the parameters in its `table`.

    Args:
        max_num_seqs: number of slots.
        vocab_size: V.
        max_model_len: maximum number of tokens of a request.
        kernels: of the model.
        capture: captures how tokens of captured steps are chosen; None: nothing is captured.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        max_model_len: int,
        kernels: KernelSet,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.table = SamplingTable(max_num_seqs, vocab_size)
        self._choice = kernels.sampling
        self.is_synchronous = self._choice.is_synchronous
        """See `TokenChoice`."""
        self._device = kernels.device
        sizes = max_num_seqs, vocab_size, max_model_len
        self._penalties = Penalties(self.table, *sizes, kernels.device, is_on_host=self.is_synchronous)
        # The one after the slots' is that of padding rows.
        self._last = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=kernels.device)
        self._captured: CapturedChoice | None = None
        if capture is not None:
            self._captured = CapturedChoice(
                self._choose,
                capture,
                kernels,
                max_num_seqs=max_num_seqs,
                num_words=num_mask_words(vocab_size),
            )

    def sample(
        self,
        logits: StepLogits,
        slots: Int64Array,
        positions: Int64Array,
        masks: RowMasks | None,
        known_tokens: Callable[[Int64Array, Int64Array], KnownTokens],
    ) -> TokensInFlight:
        """Choose one token per row.

        Args:
            logits: of R rows and V tokens; overwritten.
            slots: [R] the slot of each row; rows of one slot are adjacent.
            positions: [R] absolute index of the token to choose.
            masks: which tokens the rows' grammars allow.
            known_tokens: returns what is known of the tokens of slots before positions; few rows need that.
        """
        needs = self.table.needs(slots)
        changes = penalties = draws = raw = None
        if masks is not None or needs & CONSTRAINTS:
            known = known_tokens(slots, positions)
            changes = self._changes(slots, positions, masks, known, logits.rows.shape[1])
        if needs & PENALTIES:
            penalties = self._penalties.of_rows(slots, positions, known_tokens(slots, positions))
        if needs & DRAWS:
            draws = self.table.draws(slots, positions)
        if needs & LOGPROBS:
            raw = self._raw_logits(logits.rows, slots, are_masked=masks is not None)
        all_masks = None if changes is None else changes.masks
        if self.is_synchronous:
            token_ids, maxima = self._choose_on_host(logits.rows, draws, all_masks, changes, penalties)
        else:
            numbers = ChoiceNumbers(
                slots,
                draws,
                None if penalties is None else penalties.numbers,
                all_masks,
                None if changes is None else changes.edits,
            )
            token_ids, maxima = self._chosen(logits, numbers, penalties)
        logprobs = None if raw is None else self._logprobs(raw, token_ids)
        return TokensInFlight(
            token_ids,
            maxima,
            masks=all_masks,
            grammars=masks,
            logprobs=logprobs,
            are_known=self.is_synchronous,
        )

    def _changes(
        self,
        slots: Int64Array,
        positions: Int64Array,
        masks: RowMasks | None,
        known: KnownTokens,
        vocab_size: int,
    ) -> ChangesOfStep | None:
        """Return the logits' changes by grammars and constraints; None: none."""
        rows = self.table.is_constrained(slots, positions).nonzero()[0]
        if masks is None and not rows.size:
            return None
        changes = ChangesOfStep(masks, len(slots), vocab_size)
        of_slots, ends = slots[rows], positions[rows]
        numbers = rows, of_slots, self.table.num_prompt_tokens[of_slots], ends, known.is_missing[rows]
        for row, slot, start, end, lacks_last in zip(*(part.tolist() for part in numbers), strict=True):
            constraints = self.table.constraints[slot]
            assert constraints is not None
            changes.constrain(row, constraints, known.token_ids[slot, start:end], lacks_last=lacks_last)
        return changes

    def _choose_on_host(
        self,
        logits: torch.Tensor,
        draws: Float64Array | None,
        masks: RowMasks | None,
        changes: ChangesOfStep | None,
        penalties: StepPenalties | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens by what is in the host's memory; see `TokenChoice.choose`."""
        token_ids, maxima = self._choice.choose(
            logits,
            None if draws is None else RowDraws(draws[0], draws[1].astype(np.int64), *draws[2:]),
            None if changes is None else LogitChanges(masks, changes.row_edits),
            None if penalties is None else self._penalties.on_device(penalties.numbers, penalties.drafts),
        )
        if penalties is not None:
            self._penalties.add(penalties.numbers, token_ids)
        return token_ids, maxima

    def _chosen(
        self, logits: StepLogits, numbers: ChoiceNumbers, penalties: StepPenalties | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens, by a capture if these are logits of a captured step and it has room."""
        drafts = None if penalties is None else penalties.drafts
        captured, rows = self._captured, logits.captured
        if captured is not None and rows is not None and drafts is None and captured.has_room(rows, numbers):
            return captured.choose(rows, numbers)
        tensors = numbers.on(self._device)
        return self._choose(logits.rows, tensors, None if drafts is None else self._to_device(drafts))

    def _choose(
        self, logits: torch.Tensor, tensors: ChoiceTensors, drafts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens for logits [R, V], and keep them as the last ones of their slots; see `Choose`.

        `drafts` are those of `StepPenalties`.
        """
        draws = changes = penalties = None
        if tensors.draws is not None:
            temperature, top_k, top_p, min_p, uniforms = tensors.draws
            draws = RowDraws(temperature, top_k.long(), top_p, min_p, uniforms)
        if tensors.masks is not None or tensors.edits is not None:
            changes = LogitChanges(tensors.masks)
            if tensors.edits is not None:
                edits = LogitEdits(tensors.edits, self._last.index_select(0, tensors.slots))
                changes = LogitChanges(tensors.masks, edits)
        if tensors.penalties is not None:
            penalties = self._penalties.on_device(tensors.penalties, drafts)
        token_ids, maxima = self._choice.choose(logits, draws, changes, penalties)
        self._choice.keep_last(token_ids, tensors.slots, self._last)
        if tensors.penalties is not None:
            self._penalties.add(tensors.penalties, token_ids)
        return token_ids, maxima

    def _raw_logits(self, logits: torch.Tensor, slots: Int64Array, *, are_masked: bool) -> _RawLogits:
        num_logprobs = self.table.num_logprobs[slots]
        rows = (num_logprobs >= 0).nonzero()[0]
        of_rows = places = self._to_device(rows)
        if are_masked or self.table.needs(slots[rows]) & (CONSTRAINTS | PENALTIES):
            logits, places = logits[of_rows], self._to_device(np.arange(len(rows)))
        return _RawLogits(rows, num_logprobs[rows], of_rows, logits, places)

    def _logprobs(self, raw: _RawLogits, token_ids: torch.Tensor) -> ReportedLogprobs:
        most = min(int(raw.counts.max()), raw.logits.shape[1])
        chosen = token_ids if len(raw.rows) == len(token_ids) else token_ids[raw.of_rows]
        found = self._choice.logprobs(raw.logits, chosen, most, raw.places)
        return ReportedLogprobs(raw.rows, raw.counts, found)

    def _to_device(self, numbers: Int64Array | Float64Array) -> torch.Tensor:
        return array_to_device(numbers, self._device)

    def encoded_ids(self, known: Int64Array, last_of: Int64Array) -> Int64Array:
        """Return what `input_ids` makes token ids of, [T].

        Args:
            known: [T] token ids; any number where the host does not know the token yet.
            last_of: [T] the slot whose last token it is there, -1 elsewhere.
        """
        return np.where(last_of == _NO_SLOT, known, -1 - last_of)

    def input_ids(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return the token ids of a step, [T] int64 on the device, of `encoded_ids` on the device."""
        return encoded if self.is_synchronous else self._choice.input_ids(encoded, self._last)
