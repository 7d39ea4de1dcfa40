"""Choosing the next token of each row from its logits.

The order of operations is the one vLLM documents: log-probabilities are of the raw distribution; then the
grammar's mask, banned words, minimum length, logit bias; then repetition, frequency and presence penalties;
then greedy choice, or temperature, min-p, top-k, top-p and a draw. A row's result depends on its own logits,
parameters, tokens and position only: each operation runs along single rows in a fixed order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Float32Array, Int64Array
from quire.execution.sampling.logprobs import position_logprobs
from quire.execution.sampling.rng import uniforms
from quire.execution.sampling.selection import draw
from quire.execution.sampling.table import SamplingTable
from quire.execution.sampling.token_masks import TokenMasks
from quire.kernels.sampling.rows import SamplingKernels
from quire.step import NO_TOKEN, IntArray, PositionLogprobs

NO_CHOICE = (
    "the request's grammar (structured_outputs) or allowed_token_ids leave no token to choose: together "
    "with min_tokens, bad_words or logit_bias, all are banned here; relax one of them"
)


@dataclasses.dataclass(slots=True, frozen=True)
class SamplerOutput:
    """The tokens of one step; `logprobs` and `errors` by row, for the rows that have them.

    `error_params` is as in `ModelRunnerOutput`.
    """

    token_ids: Int64Array  # [R], NO_TOKEN for a row with an error
    logprobs: dict[int, PositionLogprobs]
    errors: dict[int, str]
    error_params: dict[int, str]


class Sampler:
    """Samples on the host.

    Args:
        table: the parameters by slot.
        kernels: scan the rows of logits.
    """

    def __init__(self, table: SamplingTable, kernels: SamplingKernels) -> None:
        self.table = table
        self._kernels = kernels

    def sample(
        self,
        logits: torch.Tensor,
        slots: Int64Array,
        positions: Int64Array,
        token_ids: IntArray,
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """Choose one token per row.

        Args:
            logits: [R, V] float32 in the host's memory; overwritten.
            slots: [R] the slot of each row; rows of the same slot are at different positions.
            positions: [R] absolute index of the token to choose; the tokens before it are known.
            token_ids: [max_num_seqs, more than the largest position] known tokens by slot.
            masks: which tokens the rows' grammars allow.
        """
        rows = _Rows(logits.numpy(), slots, positions, self._kernels)
        kept_raw = self._adjust(rows, token_ids, masks)
        self._draw(rows)
        return SamplerOutput(rows.chosen, self._logprobs(rows, kept_raw), rows.errors, rows.error_params)

    def _adjust(self, rows: _Rows, token_ids: IntArray, masks: TokenMasks | None) -> dict[int, Float32Array]:
        """Apply masks, constraints and penalties; return the raw logits of rows that still need theirs."""
        is_masked = np.zeros(len(rows.slots), dtype=np.bool_) if masks is None else masks.is_masked
        is_adjusted = self.table.is_adjusted(rows.slots, rows.positions) | is_masked
        adjusted = np.flatnonzero(is_adjusted & rows.sound)
        kept_raw = {}
        for row in adjusted.tolist():
            slot, position = int(rows.slots[row]), int(rows.positions[row])
            if self.table.num_logprobs[slot] >= 0:
                kept_raw[row] = rows.logits[row].copy()
            constraints, penalties = self.table.constraints[slot], self.table.penalties[slot]
            known = token_ids[slot, :position]
            if masks is not None and is_masked[row]:
                masks.apply(rows.logits[row], row)
            if constraints is not None:
                constraints.apply(rows.logits[row], known[self.table.num_prompt_tokens[slot] :])
            if penalties is not None:
                penalties.apply(rows.logits[row], known)
        rows.choose_again(adjusted)
        rows.refuse_without_choice(is_masked, self.table.allows_few(rows.slots))
        return kept_raw

    def _draw(self, rows: _Rows) -> None:
        # Without a mask or allowed tokens, a row where all are banned keeps its most likely token.
        drawn = np.flatnonzero(self.table.is_random(rows.slots) & rows.sound & np.isfinite(rows.maxima))
        if drawn.size:
            slots = rows.slots[drawn]
            rows.chosen[drawn] = draw(
                rows.logits,
                rows.maxima[drawn],
                self.table.filters(slots),
                uniforms(self.table.seeds(slots), rows.positions[drawn]),
                rows=drawn,
                kernels=self._kernels,
            )

    def _logprobs(self, rows: _Rows, kept_raw: dict[int, Float32Array]) -> dict[int, PositionLogprobs]:
        num_logprobs = self.table.num_logprobs[rows.slots]
        wanted = np.flatnonzero((num_logprobs >= 0) & rows.sound)
        if not wanted.size:
            return {}
        for row in np.intersect1d(wanted, list(kept_raw)).tolist():
            rows.logits[row] = kept_raw[row]
        found = position_logprobs(
            rows.logits, rows.chosen[wanted], num_logprobs[wanted], rows=wanted, kernels=self._kernels
        )
        return dict(zip(wanted.tolist(), found, strict=True))


class _Rows:
    """The rows of one call: logits, slots, and the choice so far, at first the most likely token."""

    def __init__(
        self, logits: Float32Array, slots: Int64Array, positions: Int64Array, kernels: SamplingKernels
    ) -> None:
        self._kernels = kernels
        self.logits = logits
        self.slots = slots
        self.positions = positions
        self.chosen, self.maxima = kernels.largest(logits)
        self.sound = np.isfinite(self.maxima)
        self.errors = {row: nonfinite_error(self.maxima[row]) for row in np.flatnonzero(~self.sound).tolist()}
        self.error_params: dict[int, str] = {}
        self.chosen[~self.sound] = NO_TOKEN

    def choose_again(self, rows: Int64Array) -> None:
        """Update the choice in `rows`, whose logits have changed; those with no token left keep theirs."""
        if not rows.size:
            return
        likeliest, self.maxima[rows] = self._kernels.largest(self.logits, rows)
        self.chosen[rows] = np.where(np.isfinite(self.maxima[rows]), likeliest, self.chosen[rows])

    def refuse_without_choice(self, has_grammar: BoolArray, allows_few: BoolArray) -> None:
        """Turn rows into errors in which these and the other constraints leave no token."""
        is_empty = (has_grammar | allows_few) & self.sound & ~np.isfinite(self.maxima)
        for row in np.flatnonzero(is_empty).tolist():
            self.errors[row] = NO_CHOICE
            self.error_params[row] = param_without_choice(has_grammar=has_grammar[row])
            self.chosen[row] = NO_TOKEN
            self.sound[row] = False


def param_without_choice(*, has_grammar: bool | np.bool_) -> str:
    """Return the parameter at fault where no token is left to choose."""
    return "structured_outputs" if has_grammar else "allowed_token_ids"


def nonfinite_error(largest_logit: float | np.float32) -> str:
    """Return the error of a row whose largest logit is not a finite number."""
    kind = "NaN" if np.isnan(largest_logit) else "infinite"
    return (
        f"the model produced {kind} logits for this request; the weights may be damaged, "
        "or the range of EngineConfig.dtype is too small for this model: try bfloat16 or float32"
    )
