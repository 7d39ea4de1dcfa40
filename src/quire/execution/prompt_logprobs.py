"""Log-probabilities of prompts: those of the tokens that follow the positions of each step's chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from quire.execution.arrays import Int64Array
from quire.execution.host_sampling import HostLogits
from quire.execution.logprobs import position_logprobs
from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch, RunnerRequest
from quire.execution.sampler import nonfinite_error
from quire.kernels.sampling import SamplingKernels
from quire.step import ModelRunnerOutput, PositionLogprobs, SchedulerOutput

_LOGITS_ELEMENTS = 1 << 23  # 32 MiB of float32 at a time


class PromptLogprobs:
    """Reports them for the requests that ask.

    Args:
        batch: of the runner; knows how far each request's report has come.
        logits: returns those of hidden states [R, hidden], [R, V] on the device.
        vocab_size: V.
        host_logits: brings them to the host.
        kernels: scan them there.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        host_logits: HostLogits,
        kernels: SamplingKernels,
    ) -> None:
        self._batch = batch
        self._logits = logits
        self._vocab_size = vocab_size
        self._host_logits = host_logits
        self._kernels = kernels

    def report(self, output: SchedulerOutput, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        """Report the prompt tokens that follow the positions of this step's chunks.

        Args:
            output: the step.
            hidden: [T, hidden] of its tokens.
            result: gets the log-probabilities, and the errors of requests whose logits are not finite.

        Raises:
            InconsistentPlanError: a request that asks is scheduled from beyond what was reported.
        """
        asked_end = self._batch.prompt_logprobs_end[output.slots]
        first_rows = np.cumsum(output.num_tokens) - output.num_tokens
        for row in np.flatnonzero(asked_end).tolist():
            request = self._batch.running(int(output.slots[row]))
            chunk_start = int(output.num_computed_tokens[row])
            start = request.num_prompt_logprobs_reported
            end = min(chunk_start + int(output.num_tokens[row]), int(asked_end[row]))
            if start < chunk_start:
                raise InconsistentPlanError(
                    f"request {request.request_id!r} asks for prompt_logprobs but is scheduled from token "
                    f"{chunk_start}, with {start} positions reported: its prompt must not come from a cache"
                )
            if start >= end:
                continue
            offset = int(first_rows[row]) - chunk_start
            error = self._report_positions(request, hidden[start + offset : end + offset], result)
            if error is not None:
                result.errors[request.request_id] = error
                self._batch.prompt_logprobs_end[request.slot] = 0  # the next chunk may be planned

    def _report_positions(
        self, request: RunnerRequest, hidden: torch.Tensor, result: ModelRunnerOutput
    ) -> str | None:
        """Report the tokens that follow the positions of `hidden` [N, hidden]; return an error or None."""
        start = request.num_prompt_logprobs_reported
        next_ids = self._batch.token_ids[request.slot, start + 1 : start + 1 + len(hidden)].astype(np.int64)
        count = request.sampling_params.prompt_logprobs or 0
        reported: list[PositionLogprobs] = []
        for rows in _pieces(len(hidden), max(1, _LOGITS_ELEMENTS // self._vocab_size)):
            logits = self._host_logits.fetch(self._logits(hidden[rows])).numpy()
            maxima = self._kernels.largest(logits)[1]
            unsound = np.flatnonzero(~np.isfinite(maxima))
            if unsound.size:
                return nonfinite_error(maxima[unsound[0]])
            wanted: Int64Array = np.full(len(logits), count, dtype=np.int64)
            all_rows = np.arange(len(logits))
            reported += position_logprobs(
                logits, next_ids[rows], wanted, rows=all_rows, kernels=self._kernels
            )
        result.prompt_logprobs[request.request_id] = reported
        request.num_prompt_logprobs_reported += len(reported)
        self._batch.prompt_logprobs_end[request.slot] = request.prompt_logprobs_end
        return None


def _pieces(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
