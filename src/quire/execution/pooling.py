"""Pooling: prompts become rows of their hidden states, in models that do not generate."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch, RunnerRequest
from quire.kernels.bounds import POOLED_TOKENS
from quire.kernels.devices.device import array_to_device
from quire.pooling_params import PoolingParams
from quire.step import ModelRunnerOutput, SchedulerOutput

_UNIT = 2.0**-26
"""States are rounded to multiples of it before they are added up, so that float64 has all sums exactly below
2**27. So a mean depends neither on the chunks that a prompt is computed in nor on the order of the additions.
"""

_LEAST_NORM = 1e-12  # as in torch's `normalize`

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
    """

    def __init__(
        self, batch: PersistentBatch, *, max_num_seqs: int, hidden_size: int, device: torch.device
    ) -> None:
        self._batch = batch
        self._sums = torch.zeros(max_num_seqs, hidden_size, dtype=torch.float64, device=device)
        self._next_positions = np.zeros(max_num_seqs, dtype=np.int64)  # all before are in the sums

    def open(self, request: RunnerRequest) -> None:
        """Begin with a request, or begin anew, that has just entered its slot."""
        self._sums[request.slot] = 0
        self._next_positions[request.slot] = 0

    def pool(self, output: SchedulerOutput, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        """Add the states [T, hidden] of a step's tokens; report the rows, or errors, of prompts that end.

        Raises:
            InconsistentPlanError: positions are left out that a row depends on.
        """
        params = [self._params(slot) for slot in output.slots.tolist()]
        kinds = np.array([one.pooling_type for one in params])
        self._check_positions(output, kinds)
        rows = np.repeat(np.arange(len(kinds)), output.num_tokens)
        first_tokens = np.cumsum(output.num_tokens) - output.num_tokens
        positions = np.arange(len(rows)) - (first_tokens - output.num_computed_tokens)[rows]
        is_mean, kinds_of_tokens = kinds == "mean", kinds[rows]
        num_prompt = self._batch.num_prompt_tokens[output.slots]
        counts = is_mean[rows]
        counts |= (kinds_of_tokens == "cls") & (positions == 0)
        counts |= (kinds_of_tokens == "last") & (positions == num_prompt[rows] - 1)
        tokens = np.flatnonzero(counts)
        for start in range(0, len(tokens), POOLED_TOKENS):
            piece = tokens[start : start + POOLED_TOKENS]
            self._add(output.slots[rows[piece]], is_mean[rows[piece]], piece, hidden)
        ended = np.flatnonzero(output.samples)
        if ended.size:
            divisors = np.where(is_mean, num_prompt, 1)[ended]
            slots = array_to_device(output.slots[ended].astype(np.int64), hidden.device)
            pooled = self._sums[slots].cpu().numpy() / divisors[:, None]
            for row, values in zip(ended.tolist(), pooled, strict=True):
                _report(result, output.request_ids[row], values, normalize=bool(params[row].normalize))

    def _params(self, slot: int) -> PoolingParams:
        params = self._batch.running(slot).pooling_params
        assert params is not None
        return params

    def _check_positions(self, output: SchedulerOutput, kinds: npt.NDArray[np.str_]) -> None:
        expected = self._next_positions[output.slots]
        wrong = np.flatnonzero((kinds != "last") & (output.num_computed_tokens != expected))
        if wrong.size:
            row = int(wrong[0])
            raise InconsistentPlanError(
                f"request {output.request_ids[row]!r} is pooled by {kinds[row]} and scheduled from token "
                f"{output.num_computed_tokens[row]}, with {expected[row]} pooled: its prompt must not come "
                "from a cache"
            )
        self._next_positions[output.slots] = output.num_computed_tokens + output.num_tokens

    def _add(
        self,
        slots: npt.NDArray[np.int32],
        is_mean: npt.NDArray[np.bool_],
        tokens: npt.NDArray[np.int64],
        hidden: torch.Tensor,
    ) -> None:
        """Add the states of some tokens to the sums of their slots: [N] each."""
        device = hidden.device
        states = hidden[array_to_device(tokens, device)].double()
        if is_mean.any():
            rounded = (states / _UNIT).round_().mul_(_UNIT)
            states = torch.where(array_to_device(is_mean, device)[:, None], rounded, states)
        self._sums.index_add_(0, array_to_device(slots.astype(np.int64), device), states)


def _report(
    result: ModelRunnerOutput, request_id: str, values: npt.NDArray[np.float64], *, normalize: bool
) -> None:
    if normalize:
        values = values / max(float(np.sqrt(np.square(values).sum())), _LEAST_NORM)
    row = values.astype(np.float32)
    if np.isfinite(row).all():
        result.pooled[request_id] = row.tobytes()
    else:
        result.errors[request_id] = _NOT_FINITE
