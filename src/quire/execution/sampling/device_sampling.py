"""Choosing tokens on the device, where the next step finds them: nobody has to wait for them in between."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Float64Array, Int64Array
from quire.execution.known_tokens import KnownTokens
from quire.execution.sampling.captured_choice import ChoiceNumbers, ChoiceTensors, RecordedChoice
from quire.execution.sampling.device_penalties import DevicePenalties, StepPenalties
from quire.execution.sampling.logit_changes import ChangesOfStep, changes_of_step, num_mask_words
from quire.execution.sampling.logprobs import of_device
from quire.execution.sampling.rng import uniforms
from quire.execution.sampling.sampler import NO_CHOICE, SamplerOutput, nonfinite_error, param_without_choice
from quire.execution.sampling.table import SamplingTable
from quire.execution.sampling.token_masks import TokenMasks
from quire.execution.step_graphs import Record, StepLogits
from quire.kernels.devices.device import HostCopy, array_to_device
from quire.kernels.interface import KernelSet
from quire.kernels.sampling.token_choice import LogitChanges, LogitEdits, RowDraws, RowLogprobs, TokenChoice
from quire.step import NO_TOKEN

_NO_SLOT = -1


class TokensInFlight:
    """The tokens that a device chooses for the rows of one call.

    Whoever asks is told the same: either what they are, or that the device has failed.

    Args:
        token_ids, maxima: see `TokenChoice.choose`.
        is_masked: [R] rows that choose among some tokens only.
        has_grammar: [R] those of them that a grammar has masked.
        logprobs: of the rows `logprob_rows` [S].
        num_logprobs: [S] how many of the likeliest tokens each of them reports.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        maxima: torch.Tensor,
        *,
        is_masked: BoolArray,
        has_grammar: BoolArray,
        logprobs: RowLogprobs | None,
        logprob_rows: Int64Array,
        num_logprobs: Int64Array,
    ) -> None:
        self._is_masked = is_masked
        self._has_grammar = has_grammar
        self._logprob_rows = logprob_rows
        self._num_logprobs = num_logprobs
        of_logprobs = () if logprobs is None else (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
        self._copies = [HostCopy(tensor) for tensor in (token_ids, maxima, *of_logprobs)]
        self._lock = threading.Lock()
        self._outcome: list[torch.Tensor] | Exception | None = None
        self.known_at = math.inf
        """When somebody who waited was told, by `time.perf_counter`."""

    @property
    def have_arrived(self) -> bool:
        """Whether somebody who waits would be told at once: also if the device cannot say how far it is."""
        try:
            return self._outcome is not None or all(copy.has_arrived for copy in self._copies)
        except Exception:  # whoever waits is told then, and everybody else the same
            return True

    def token_ids(self) -> Int64Array:
        """Return the token of each row [R], NO_TOKEN where there is an error, as soon as the host has them.

        Raises:
            Exception: whatever the device has failed with.
        """
        token_ids: Int64Array = self._wait()[0].numpy()
        return token_ids

    def sampled(self) -> SamplerOutput:
        """Return all that was asked for as soon as the host has it; raises as `token_ids`."""
        chosen, largest, *of_logprobs = self._wait()
        token_ids, maxima = chosen.numpy().copy(), largest.numpy()
        errors, error_params = {}, {}
        for row in np.flatnonzero(token_ids == NO_TOKEN).tolist():
            if self._is_masked[row] and maxima[row] == -np.inf:
                errors[row] = NO_CHOICE
                error_params[row] = param_without_choice(has_grammar=self._has_grammar[row])
            else:
                errors[row] = nonfinite_error(maxima[row])
        logprobs = {}
        if of_logprobs:
            ids, values, ranks = of_logprobs
            positions = of_device(ids, values, ranks, self._num_logprobs)
            found = zip(self._logprob_rows.tolist(), positions, strict=True)
            logprobs = {row: position for row, position in found if row not in errors}
        return SamplerOutput(token_ids, logprobs, errors, error_params)

    def _wait(self) -> list[torch.Tensor]:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = [copy.wait() for copy in self._copies]
                except Exception as error:
                    self._outcome = error
                self.known_at = time.perf_counter()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class DeviceSampler:
    """Chooses tokens with the parameters in `table`, and keeps the last one of each slot on the device.

    Args:
        choice: of the device.
        kernels: of the device.
        table: the parameters by slot.
        penalties: of the slots.
        max_num_seqs: number of slots.
        vocab_size: V.
        record: records how tokens of recorded steps are chosen; None: nothing is recorded.
    """

    def __init__(
        self,
        choice: TokenChoice,
        kernels: KernelSet,
        table: SamplingTable,
        penalties: DevicePenalties,
        *,
        max_num_seqs: int,
        vocab_size: int,
        record: Record | None,
    ) -> None:
        self._choice = choice
        self._table = table
        self._penalties = penalties
        # The one behind the slots' is of rows that are nobody's.
        self._last = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=kernels.device)
        self._recorded: RecordedChoice | None = None
        if record is not None:
            self._recorded = RecordedChoice(
                self._choose,
                record,
                kernels,
                max_num_seqs=max_num_seqs,
                num_words=num_mask_words(vocab_size),
            )

    def sample(
        self,
        logits: StepLogits,
        slots: Int64Array,
        positions: Int64Array,
        *,
        masks: TokenMasks | None,
        known: KnownTokens,
    ) -> TokensInFlight:
        """Choose one token per row.

        Args:
            logits: of R rows and V tokens; overwritten.
            slots: [R] the slot of each row; rows of one slot are adjacent.
            positions: [R] absolute index of the token to choose.
            masks: which tokens the rows' grammars allow.
            known: of the tokens before.
        """
        num_logprobs = self._table.num_logprobs[slots]
        rows = np.flatnonzero(num_logprobs >= 0)
        vocab_size = logits.rows.shape[1]
        changes = changes_of_step(self._table, slots, positions, masks, known, vocab_size=vocab_size)
        penalties = self._penalties.of_rows(slots, positions, known)
        draws = self._draws(slots, positions)
        of_rows = self._to_device(rows) if rows.size else None
        raw, raw_rows = logits.rows, of_rows
        if of_rows is not None and not (changes is None and penalties is None):
            raw, raw_rows = raw[of_rows], self._to_device(np.arange(len(rows)))
        token_ids, maxima = self._chosen(logits, slots, draws, changes, penalties)
        logprobs = None
        if of_rows is not None and raw_rows is not None:
            most = min(int(num_logprobs[rows].max()), vocab_size)
            logprobs = self._choice.logprobs(raw, token_ids[of_rows], most, raw_rows)
        nowhere = np.zeros(len(slots), dtype=np.bool_)
        return TokensInFlight(
            token_ids,
            maxima,
            is_masked=nowhere if changes is None else changes.is_masked,
            has_grammar=nowhere if masks is None else masks.is_masked,
            logprobs=logprobs,
            logprob_rows=rows,
            num_logprobs=num_logprobs[rows],
        )

    def _chosen(
        self,
        logits: StepLogits,
        slots: Int64Array,
        draws: Float64Array | None,
        changes: ChangesOfStep | None,
        penalties: StepPenalties | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens, as a recording does if these are the logits of one and it can."""
        drafts = None if penalties is None else penalties.drafts
        numbers = ChoiceNumbers(
            slots,
            draws,
            None if penalties is None else penalties.numbers,
            None if changes is None else changes.masks,
            None if changes is None else changes.edits,
        )
        recorded, rows = self._recorded, logits.recorded
        if recorded is not None and rows is not None and drafts is None and recorded.has_room(rows, numbers):
            return recorded.choose(rows, numbers)
        tensors = numbers.on(self._last.device)
        return self._choose(logits.rows, tensors, None if drafts is None else self._to_device(drafts))

    def _choose(
        self, logits: torch.Tensor, tensors: ChoiceTensors, drafts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens for logits [R, V], and keep them as the last ones of their slots; see `Choose`.

        `drafts` are those of `StepPenalties`.
        """
        draws = penalties = None
        if tensors.draws is not None:
            temperature, top_k, top_p, min_p, drawn = tensors.draws
            draws = RowDraws(temperature, top_k.long(), top_p, min_p, drawn)
        if tensors.penalties is not None:
            penalties = self._penalties.on_device(tensors.penalties, drafts)
        token_ids, maxima = self._choice.choose(logits, draws, self._changes(tensors), penalties)
        self._choice.keep_last(token_ids, tensors.slots, self._last)
        if tensors.penalties is not None:
            self._penalties.add(tensors.penalties, token_ids)
        return token_ids, maxima

    def _changes(self, tensors: ChoiceTensors) -> LogitChanges | None:
        if tensors.edits is None:
            return None if tensors.masks is None else LogitChanges(tensors.masks)
        return LogitChanges(tensors.masks, LogitEdits(tensors.edits, self._last[tensors.slots]))

    def _to_device(self, numbers: Int64Array | Float64Array) -> torch.Tensor:
        return array_to_device(numbers, self._last.device)

    def encoded_ids(self, known: Int64Array, last_of: Int64Array) -> Int64Array:
        """Return what `input_ids` makes token ids of, [T].

        Args:
            known: [T] token ids; any number where the host does not know the token yet.
            last_of: [T] the slot whose last token it is there, -1 elsewhere.
        """
        return np.where(last_of == _NO_SLOT, known, -1 - last_of)

    def input_ids(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return the token ids of a step, [T] int64 on the device, of `encoded_ids` on the device."""
        return self._choice.input_ids(encoded, self._last)

    def _draws(self, slots: Int64Array, positions: Int64Array) -> Float64Array | None:
        """Return the numbers that `RowDraws` are made of, [NUM_DRAW_NUMBERS, R]; None: nobody draws."""
        is_random = self._table.is_random(slots)
        if not is_random.any():
            return None
        filters = self._table.filters(slots)
        return np.stack(
            [
                filters.temperature,
                filters.top_k,
                filters.top_p,
                filters.min_p,
                uniforms(self._table.seeds(slots), positions),
            ]
        )
