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
from quire.pooling_params import PoolingParams, PoolingType
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
        rows_of: dict[PoolingType, list[int]] = {}
        for row, one in enumerate(params):
            assert one.pooling_type is not None
            rows_of.setdefault(one.pooling_type, []).append(row)
        for kind, rows in rows_of.items():
            self._check_positions(output, kind, rows)
            if kind == "all":
                self._take_in_all(output, rows, hidden)
            else:
                self._take_in(output, kind, np.array(rows), hidden)
        slots = output.slots.astype(np.int64)
        self._next_positions[slots] = output.num_computed_tokens + output.num_tokens
        ended = np.flatnonzero(output.samples)
        if ended.size:
            pooled = self._sums[array_to_device(slots[ended], hidden.device)].cpu()
            if "mean" in rows_of:
                is_mean = np.array([params[row].pooling_type == "mean" for row in ended.tolist()])
                divisors = np.where(is_mean, self._batch.num_prompt_tokens[slots[ended]], 1)
                pooled /= torch.from_numpy(divisors)[:, None]
            if self._row_layers:
                pooled = through(self._row_layers, pooled).double()
            for row, values in zip(ended.tolist(), pooled, strict=True):
                is_of_tokens = params[row].pooling_type == "all"
                made = torch.cat(self._token_rows.pop(int(slots[row]))).double() if is_of_tokens else values
                if self._activation and params[row].activation is not False:
                    made = _ACTIVATIONS[self._activation](made)
                _report(result, output.request_ids[row], made.numpy(), params[row])

    def _take_in_all(self, output: SchedulerOutput, rows: Sequence[int], hidden: torch.Tensor) -> None:
        """Keep what the layers make of each token of the requests in `rows` of a step."""
        starts = np.cumsum(output.num_tokens) - output.num_tokens
        for row in rows:
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

    def _take_in(
        self, output: SchedulerOutput, kind: PoolingType, rows: Int64Array, hidden: torch.Tensor
    ) -> None:
        """Add the states [T, hidden] that count, of the requests in `rows`."""
        counts, computed = output.num_tokens[rows], output.num_computed_tokens[rows]
        slots = output.slots[rows].astype(np.int64)
        num_prompt = self._batch.num_prompt_tokens[slots]
        begins = slots if kind == "last" else slots[computed == 0]
        self._sums[array_to_device(begins, hidden.device)] = -math.inf if kind == "max" else 0.0
        starts = (np.cumsum(output.num_tokens) - output.num_tokens)[rows]  # of their tokens in the step
        if kind in ("last", "cls"):
            place = (num_prompt - 1 if kind == "last" else 0) - computed
            owners = np.flatnonzero((place >= 0) & (place < counts))
            places = place[owners]
        else:
            owners = np.repeat(np.arange(len(rows)), counts)
            places = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        for start in range(0, len(owners), POOLED_TOKENS):
            piece = slice(start, start + POOLED_TOKENS)
            own, place = owners[piece], places[piece]
            states = hidden[array_to_device(starts[own] + place, hidden.device)].double()
            if kind == "weighted_mean":
                lengths, position = num_prompt[own], computed[own] + place
                shares = 2 * (position + 1) / (lengths * (lengths + 1))
                states *= array_to_device(shares, states.device)[:, None]
            self._add(kind, slots[own], states)

    def _params(self, slot: int) -> PoolingParams:
        params = self._batch.running(slot).pooling_params
        assert params is not None
        return params

    def _check_positions(self, output: SchedulerOutput, kind: PoolingType, rows: Sequence[int]) -> None:
        """Check that those of `rows` that depend on earlier positions go on where their last chunk ended."""
        if kind == "last":
            return
        for row in rows:
            computed, expected = output.num_computed_tokens[row], self._next_positions[output.slots[row]]
            if computed and computed != expected:
                raise InconsistentPlanError(
                    f"request {output.request_ids[row]!r} is pooled by {kind} and scheduled from token "
                    f"{computed}, with {expected} pooled: its prompt must not come from a cache"
                )

    def _add(self, kind: PoolingType, slots: Int64Array, states: torch.Tensor) -> None:
        """Add states [N, hidden] float64, of weighted means times their shares, to sums of slots [N]."""
        if kind == "max":
            for slot in np.unique(slots).tolist():
                own = states[array_to_device(np.flatnonzero(slots == slot), states.device)]
                self._sums[slot] = torch.maximum(self._sums[slot], own.amax(0))
            return
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
