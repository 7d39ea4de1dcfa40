"""Pooling: prompts become rows of their hidden states, in models that do not generate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch
from quire.kernels.bounds import POOLED_TOKENS
from quire.kernels.devices.device import array_to_device
from quire.models.row_layers import DenseRows, through
from quire.pooling_params import PoolingParams
from quire.step import Int64Array, ModelRunnerOutput, SchedulerOutput

_UNITS = {"mean": 2.0**-26, "weighted_mean": 2.0**-36}
"""States, of the latter times their shares, are rounded to multiples of it before they are added up, so that
float64 has all sums exactly below 2**27 and 2**17. So a mean depends neither on the chunks that a prompt is
computed in nor on the order of the additions.
"""

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda scores: scores.softmax(-1),
    "sigmoid": torch.sigmoid,
}
_MIN_NORM = 1e-12  # as in torch's `normalize`

_NOT_FINITE = (
    "the model produced hidden states for this request that are NaN or infinite; the weights may be "
    "damaged, or the range of EngineConfig.dtype is too small for this model: try bfloat16 or float32"
)


class Pooler:
    """Adds up the hidden states of each request, one or all, over the chunks of its prompt.

    Args:
        batch: of the runner.
        max_num_seqs: number of slots.
        hidden_size: features of a state.
        device: where states are.
        row_layers: what rows go through.
        activation: what makes probabilities of them; see `ModelConfig.label_activation`.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        *,
        max_num_seqs: int,
        hidden_size: int,
        device: torch.device,
        row_layers: Sequence[DenseRows] = (),
        activation: str = "",
    ) -> None:
        self._batch = batch
        self._row_layers = row_layers
        self._activation = activation
        self._sums = torch.zeros(max_num_seqs, hidden_size, dtype=torch.float64, device=device)
        self._token_rows: dict[int, list[torch.Tensor]] = {}  # of all tokens so far, by slot
        # All positions before are in the sums, as far as they count.
        self._next_positions: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def open(self, slot: int) -> None:
        """Note that a request has entered a slot; its prompt starts at its first token."""
        self._next_positions[slot] = 0

    def pool(self, output: SchedulerOutput, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        """Add the states [T, hidden] of a step's tokens; report the rows, or errors, of prompts that end.

        Raises:
            InconsistentPlanError: positions are left out that a row depends on.
        """
        params = [self._params(slot) for slot in output.slots.tolist()]
        kinds = np.array([one.pooling_type for one in params])
        slots = output.slots.astype(np.int64)
        is_new = (output.num_computed_tokens == 0) | (kinds == "last")
        self._check_positions(output, kinds, np.flatnonzero(~is_new))
        for is_kind, start in ((kinds == "max", -math.inf), (kinds != "max", 0.0)):
            self._sums[array_to_device(slots[is_new & is_kind], hidden.device)] = start
        self._take_in(output, kinds, hidden)
        self._take_in_all(output, np.flatnonzero(kinds == "all"), hidden)
        self._next_positions[slots] = output.num_computed_tokens + output.num_tokens
        ended = np.flatnonzero(output.samples)
        if ended.size:
            divisors = np.where(kinds == "mean", self._batch.num_prompt_tokens[slots], 1)[ended]
            pooled = self._sums[array_to_device(slots[ended], hidden.device)].cpu()
            pooled /= torch.from_numpy(divisors)[:, None]
            if self._row_layers:
                pooled = through(self._row_layers, pooled).double()
            for row, values in zip(ended.tolist(), pooled, strict=True):
                is_of_tokens = kinds[row] == "all"
                made = torch.cat(self._token_rows.pop(int(slots[row]))).double() if is_of_tokens else values
                if self._activation and params[row].activation is not False:
                    made = _ACTIVATIONS[self._activation](made)
                _report(result, output.request_ids[row], made.numpy(), params[row])

    def _take_in_all(self, output: SchedulerOutput, rows: Int64Array, hidden: torch.Tensor) -> None:
        """Keep what the layers make of each token of the requests in `rows` of a step."""
        starts = np.cumsum(output.num_tokens) - output.num_tokens
        for row in rows.tolist():
            if not output.num_computed_tokens[row]:
                self._token_rows[int(output.slots[row])] = []
            states = hidden[int(starts[row]) : int(starts[row] + output.num_tokens[row])]
            self._token_rows[int(output.slots[row])].append(through(self._row_layers, states))

    def token_types(self, output: SchedulerOutput) -> torch.Tensor | None:
        """Return the type of each of a step's tokens, [T]; None: all are of the first."""
        starts = [self._params(slot).second_text_at for slot in output.slots.tolist()]
        if not any(starts):
            return None
        of_second = [
            np.arange(first, first + count) >= (count + first if start is None else start)
            for start, first, count in zip(
                starts, output.num_computed_tokens.tolist(), output.num_tokens.tolist(), strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(of_second).astype(np.int64))

    def _take_in(self, output: SchedulerOutput, kinds: npt.NDArray[np.str_], hidden: torch.Tensor) -> None:
        """Add the states [T, hidden] that count; `kinds` of pooling are by request."""
        rows = np.repeat(np.arange(len(kinds)), output.num_tokens)
        first_tokens = np.cumsum(output.num_tokens) - output.num_tokens
        positions = np.arange(len(rows)) - (first_tokens - output.num_computed_tokens)[rows]
        num_prompt = self._batch.num_prompt_tokens[output.slots]
        counted_position = np.where(kinds == "last", num_prompt - 1, 0)
        is_one = (kinds == "last") | (kinds == "cls")
        is_added = ~is_one & (kinds != "all")
        tokens = np.flatnonzero(is_added[rows] | is_one[rows] & (positions == counted_position[rows]))
        for start in range(0, len(tokens), POOLED_TOKENS):
            piece = tokens[start : start + POOLED_TOKENS]
            for kind in dict.fromkeys(kinds[rows[piece]].tolist()):
                own = piece[kinds[rows[piece]] == kind]
                lengths = num_prompt[rows[own]]
                shares = 2 * (positions[own] + 1) / (lengths * (lengths + 1))
                states = hidden[array_to_device(own, hidden.device)].double()
                self._add(kind, output.slots[rows[own]].astype(np.int64), states, shares)

    def _params(self, slot: int) -> PoolingParams:
        params = self._batch.running(slot).pooling_params
        assert params is not None
        return params

    def _check_positions(
        self, output: SchedulerOutput, kinds: npt.NDArray[np.str_], continued: Int64Array
    ) -> None:
        """Check that `continued` rows go on where their last chunk ended."""
        expected = self._next_positions[output.slots]
        for row in continued.tolist():
            if output.num_computed_tokens[row] != expected[row]:
                raise InconsistentPlanError(
                    f"request {output.request_ids[row]!r} is pooled by {kinds[row]} and scheduled from token "
                    f"{output.num_computed_tokens[row]}, with {expected[row]} pooled: its prompt must not "
                    "come from a cache"
                )

    def _add(
        self, kind: str, slots: Int64Array, states: torch.Tensor, shares: npt.NDArray[np.float64]
    ) -> None:
        """Add states [N, hidden] float64 to the sums of their slots [N]; shares are of weighted means."""
        if kind == "max":
            for slot in np.unique(slots).tolist():
                own = states[array_to_device(np.flatnonzero(slots == slot), states.device)]
                self._sums[slot] = torch.maximum(self._sums[slot], own.amax(0))
            return
        if kind == "weighted_mean":
            states = states * array_to_device(shares, states.device)[:, None]
        if kind in _UNITS:
            states = (states / _UNITS[kind]).round_().mul_(_UNITS[kind])
        self._sums.index_add_(0, array_to_device(slots, states.device), states)


def _report(
    result: ModelRunnerOutput, request_id: str, values: npt.NDArray[np.float64], params: PoolingParams
) -> None:
    values = values[..., : params.dimensions]
    if params.normalize:
        norms = np.sqrt(np.square(values).sum(axis=-1, keepdims=True))
        values = values / np.maximum(norms, _MIN_NORM)
    row = values.astype(np.float32)
    if np.isfinite(row).all():
        result.pooled[request_id] = row.tobytes()
    else:
        result.errors[request_id] = _NOT_FINITE
