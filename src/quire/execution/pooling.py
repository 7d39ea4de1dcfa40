"""Pooling: prompts become rows of their hidden states, in models that do not generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch
from quire.kernels.arrays import Float64Array
from quire.kernels.devices.device import array_to_device, rows_on_host
from quire.kernels.interface import KernelSet
from quire.models.row_layers import DenseRows, through
from quire.pooling_params import PoolingParams, PoolingType
from quire.step import Int64Array, IntArray, ModelRunnerOutput, SchedulerOutput

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
        kernels: of the model.
        row_layers: what rows go through.
        activation: what makes probabilities of them; see `ModelConfig.label_activation`.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        *,
        max_num_seqs: int,
        hidden_size: int,
        kernels: KernelSet,
        row_layers: Sequence[DenseRows] = (),
        activation: str = "",
    ) -> None:
        self._batch = batch
        self._row_layers = row_layers
        self._activation = activation
        self._kernels = kernels
        self._sums = torch.zeros(max_num_seqs, hidden_size, dtype=torch.float64, device=kernels.device)
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
        starts = output.num_tokens.cumsum() - output.num_tokens  # of the requests' tokens in the step
        for kind, rows in rows_of.items():
            self._check_positions(output, kind, rows)
            if kind == "all":
                self._take_in_all(output, rows, starts, hidden)
            else:
                self._take_in(output, kind, np.array(rows), starts, hidden)
        slots = output.slots.astype(np.int64)
        self._next_positions[slots] = output.num_computed_tokens + output.num_tokens
        ended = output.samples.nonzero()[0]
        if not ended.size:
            return
        pooled = rows_on_host(self._sums, slots[ended])
        is_mean = np.array([params[row].pooling_type == "mean" for row in ended.tolist()])
        pooled /= np.where(is_mean, self._batch.num_prompt_tokens[slots[ended]], 1)[:, None]
        if self._row_layers:
            pooled = through(self._row_layers, torch.from_numpy(pooled)).double().numpy()
        for row, values in zip(ended.tolist(), pooled, strict=True):
            is_of_tokens = params[row].pooling_type == "all"
            made = (
                torch.cat(self._token_rows.pop(int(slots[row]))).double().numpy() if is_of_tokens else values
            )
            if self._activation and params[row].activation is not False:
                made = _ACTIVATIONS[self._activation](torch.from_numpy(made)).numpy()
            _report(result, output.request_ids[row], made, params[row])

    def _take_in_all(
        self, output: SchedulerOutput, rows: Sequence[int], starts: IntArray, hidden: torch.Tensor
    ) -> None:
        """Keep what the layers make of each token of the requests in `rows` of a step."""
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
        self,
        output: SchedulerOutput,
        kind: PoolingType,
        rows: Int64Array,
        starts: IntArray,
        hidden: torch.Tensor,
    ) -> None:
        """Take in the states [T, hidden] that count, of the requests in `rows`."""
        counts = output.num_tokens[rows].astype(np.int64)
        computed = output.num_computed_tokens[rows].astype(np.int64)
        slots = output.slots[rows].astype(np.int64)
        first = starts[rows]
        if kind in ("last", "cls"):
            place = (self._batch.num_prompt_tokens[slots] - 1 if kind == "last" else 0) - computed
            is_in_step = (place >= 0) & (place < counts)
            states = hidden[array_to_device((first + place)[is_in_step], hidden.device)]
            self._sums[array_to_device(slots[is_in_step], hidden.device)] = states.double()
        elif kind == "max":
            for slot, start, count, before in zip(slots, first, counts, computed, strict=True):
                largest = hidden[start : start + count].amax(0).double()
                self._sums[slot] = torch.maximum(self._sums[slot], largest) if before else largest
        else:
            shares = self._shares(output, starts) if kind == "weighted_mean" else None
            pieces = np.array((first, counts, slots, computed == 0)).T.copy()
            self._kernels.sum_rows(hidden, pieces, self._sums, unit=_UNITS[kind], shares=shares)

    def _shares(self, output: SchedulerOutput, starts: IntArray) -> Float64Array:
        """Return what the states of each of a step's tokens count for in weighted means, [T]."""
        counts = output.num_tokens
        lengths = np.repeat(self._batch.num_prompt_tokens[output.slots], counts)
        position = np.arange(len(lengths)) + np.repeat(output.num_computed_tokens - starts, counts)
        shares: Float64Array = 2 * (position + 1) / (lengths * (lengths + 1))
        return shares

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
