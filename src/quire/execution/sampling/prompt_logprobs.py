"""Log-probabilities of prompts: those of the tokens that follow the positions of each step's chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from quire.execution.model import Model
from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch
from quire.execution.sampling.tokens_in_flight import nonfinite_error, position_logprobs
from quire.kernels.bounds import prompt_logit_rows
from quire.kernels.devices.device import HostCopy, array_to_device
from quire.kernels.sampling.token_choice import RowLogprobs
from quire.step import Int64Array, ModelRunnerOutput, PositionLogprobs, SchedulerOutput


@dataclasses.dataclass(slots=True, frozen=True)
class StepPromptLogprobs:
    """What the requests of one step report."""

    _of_requests: Mapping[str, _Positions]

    @property
    def have_arrived(self) -> bool:
        """Whether nothing waits."""
        return all(positions.have_arrived for positions in self._of_requests.values())

    def errors(self) -> dict[str, str]:
        """Return the errors of requests whose logits are not finite; waits for the device."""
        found = ((request_id, positions.error()) for request_id, positions in self._of_requests.items())
        return {request_id: error for request_id, error in found if error is not None}

    def report(self, result: ModelRunnerOutput) -> None:
        """Put log-probabilities and errors into the result of the step; waits for the device."""
        errors = self.errors()
        result.errors.update(errors)
        for request_id, positions in self._of_requests.items():
            if request_id not in errors:
                result.prompt_logprobs[request_id] = positions.logprobs()


NO_PROMPT_LOGPROBS = StepPromptLogprobs({})


class PromptLogprobs:
    """Computes log-probabilities of prompts for the requests that ask for them.

    Args:
        batch: of the runner; knows how far each request's report has come.
        model: returns the logits of hidden states, [R, V] of [R, hidden], and has the kernels that scan them.
        max_num_seqs: maximum number of rows that are sampled in a step.
    """

    def __init__(self, batch: PersistentBatch, model: Model, max_num_seqs: int) -> None:
        self._batch = batch
        self._model = model
        self._vocab_size = model.config.vocab_size
        self._num_rows = prompt_logit_rows(self._vocab_size, max_num_seqs)

    def begin(self, output: SchedulerOutput, hidden: torch.Tensor) -> StepPromptLogprobs:
        """Begin to compute those of the prompt tokens after the positions of a step's chunks.

        Args:
            output: the step.
            hidden: [T, hidden] of its tokens.

        Raises:
            InconsistentPlanError: a request that asks is scheduled from beyond what was reported.
        """
        asked_end = self._batch.prompt_logprobs_end[output.slots]
        if not asked_end.any():
            return NO_PROMPT_LOGPROBS
        found: dict[str, _Positions] = {}
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
            found[request.request_id] = self._find(
                hidden[start + offset : end + offset],
                self._batch.token_ids[request.slot, start + 1 : end + 1].astype(np.int64),
                request.sampling_params.prompt_logprobs or 0,
            )
            request.num_prompt_logprobs_reported = end
            self._batch.prompt_logprobs_end[request.slot] = request.prompt_logprobs_end
        return StepPromptLogprobs(found)

    def _find(self, hidden: torch.Tensor, next_ids: Int64Array, count: int) -> _Positions:
        """Begin to compute the log-probabilities of N tokens.

        Args:
            hidden: [N, hidden] at the positions before them.
            next_ids: [N] the tokens.
            count: how many of the likeliest tokens to report as well.
        """
        chosen = array_to_device(next_ids, hidden.device)
        numbers = torch.arange(min(len(hidden), self._num_rows), device=hidden.device)
        num_likeliest = min(count, self._vocab_size)
        choice = self._model.kernels.sampling
        pieces = []
        for start in range(0, len(hidden), self._num_rows):
            rows = slice(start, start + self._num_rows)
            logits, of_piece = self._model.logits(hidden[rows]), chosen[rows]
            pieces.append(choice.logprobs(logits, of_piece, num_likeliest, numbers[: len(of_piece)]))
        return _Positions(pieces, count)


class _Positions:
    """Log-probabilities at adjacent positions of a prompt, which the host has or gets from a device."""

    def __init__(self, pieces: list[RowLogprobs], count: int) -> None:
        names = ("maxima", "token_ids", "logprobs", "ranks")
        self._copies = [HostCopy(torch.cat([getattr(piece, name) for piece in pieces])) for name in names]
        self._count = count

    @property
    def have_arrived(self) -> bool:
        """Whether nothing waits."""
        return all(copy.has_arrived for copy in self._copies)

    def error(self) -> str | None:
        """Return what is wrong with the logits as soon as that is known."""
        maxima = self._copies[0].wait().numpy()
        unsound = np.flatnonzero(~np.isfinite(maxima))
        return nonfinite_error(maxima[unsound[0]]) if unsound.size else None

    def logprobs(self) -> list[PositionLogprobs]:
        """Return the log-probabilities as soon as they are known; undefined if there is an error."""
        found = [copy.wait() for copy in self._copies[1:]]
        return list(position_logprobs(found, np.full(len(found[0]), self._count)))
