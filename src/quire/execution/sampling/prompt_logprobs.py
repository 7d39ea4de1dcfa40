"""Log-probabilities of prompts: those of the tokens that follow the positions of each step's chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from quire.execution.arrays import Float32Array, Int64Array
from quire.execution.persistent_batch import InconsistentPlanError, PersistentBatch
from quire.execution.sampling.logprobs import of_device, position_logprobs
from quire.execution.sampling.sampler import nonfinite_error
from quire.kernels.bounds import prompt_logit_rows
from quire.kernels.devices.device import HostCopy, array_to_device
from quire.kernels.sampling.rows import SamplingKernels
from quire.kernels.sampling.token_choice import RowLogprobs, TokenChoice
from quire.step import ModelRunnerOutput, PositionLogprobs, SchedulerOutput


class PositionsInFlight(Protocol):
    """Log-probabilities at adjacent positions of a prompt, which the host has or gets from a device."""

    @property
    def have_arrived(self) -> bool:
        """Whether nothing waits."""

    def error(self) -> str | None:
        """Return what is wrong with the logits as soon as that is known."""

    def logprobs(self) -> list[PositionLogprobs]:
        """Return the log-probabilities as soon as they are known; if there is an error, any."""


class PositionLogits(Protocol):
    """Finds log-probabilities by logits that are still to be computed."""

    def find(self, hidden: torch.Tensor, next_ids: Int64Array, count: int) -> PositionsInFlight:
        """Begin to compute the log-probabilities of N tokens.

        Args:
            hidden: [N, hidden] at the positions before them.
            next_ids: [N] the tokens.
            count: how many of the likeliest tokens to report as well.
        """


@dataclasses.dataclass(slots=True, frozen=True)
class StepPromptLogprobs:
    """What the requests of one step report."""

    _of_requests: Mapping[str, PositionsInFlight]

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
    """Finds them for the requests that ask.

    Args:
        batch: of the runner; knows how far each request's report has come.
        logits: finds log-probabilities.
    """

    def __init__(self, batch: PersistentBatch, logits: PositionLogits) -> None:
        self._batch = batch
        self._logits = logits

    def begin(self, output: SchedulerOutput, hidden: torch.Tensor) -> StepPromptLogprobs:
        """Begin to compute those of the prompt tokens that follow the positions of a step's chunks.

        Args:
            output: the step.
            hidden: [T, hidden] of its tokens.

        Raises:
            InconsistentPlanError: a request that asks is scheduled from beyond what was reported.
        """
        asked_end = self._batch.prompt_logprobs_end[output.slots]
        if not asked_end.any():
            return NO_PROMPT_LOGPROBS
        found: dict[str, PositionsInFlight] = {}
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
            found[request.request_id] = self._logits.find(
                hidden[start + offset : end + offset],
                self._batch.token_ids[request.slot, start + 1 : end + 1].astype(np.int64),
                request.sampling_params.prompt_logprobs or 0,
            )
            request.num_prompt_logprobs_reported = end
            self._batch.prompt_logprobs_end[request.slot] = request.prompt_logprobs_end
        return StepPromptLogprobs(found)


class HostPositionLogits:
    """Has the host scan the logits.

    Args:
        logits: returns those of hidden states [R, hidden], [R, V] in the host's memory.
        vocab_size: V.
        kernels: scan them.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        kernels: SamplingKernels,
    ) -> None:
        self._logits = logits
        self._num_rows = prompt_logit_rows(vocab_size)
        self._kernels = kernels

    def find(self, hidden: torch.Tensor, next_ids: Int64Array, count: int) -> PositionsInFlight:
        """See `PositionLogits`."""
        found: list[PositionLogprobs] = []
        for rows in _pieces(len(hidden), self._num_rows):
            logits = self._logits(hidden[rows]).numpy()
            error = _error_of(self._kernels.largest(logits)[1])
            if error is not None:
                return _KnownPositions([], error)
            wanted: Int64Array = np.full(len(logits), count, dtype=np.int64)
            all_rows = np.arange(len(logits))
            found += position_logprobs(logits, next_ids[rows], wanted, rows=all_rows, kernels=self._kernels)
        return _KnownPositions(found)


@dataclasses.dataclass(slots=True, frozen=True)
class _KnownPositions:
    _found: list[PositionLogprobs]
    _error: str | None = None
    have_arrived = True

    def error(self) -> str | None:
        return self._error

    def logprobs(self) -> list[PositionLogprobs]:
        return self._found


class DevicePositionLogits:
    """Has the device scan the logits; nobody waits.

    Args:
        logits: returns those of hidden states [R, hidden], [R, V].
        vocab_size: V.
        choice: of the device.
        max_num_seqs: rows that are sampled in a step at the most.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        choice: TokenChoice,
        max_num_seqs: int,
    ) -> None:
        self._logits = logits
        self._num_rows = prompt_logit_rows(vocab_size, max_num_seqs)
        self._vocab_size = vocab_size
        self._choice = choice

    def find(self, hidden: torch.Tensor, next_ids: Int64Array, count: int) -> PositionsInFlight:
        """See `PositionLogits`."""
        chosen = array_to_device(next_ids, hidden.device)
        numbers = torch.arange(min(len(hidden), self._num_rows), device=hidden.device)
        num_likeliest = min(count, self._vocab_size)
        found = []
        for rows in _pieces(len(hidden), self._num_rows):
            of_piece = chosen[rows]
            logits = self._logits(hidden[rows])
            found.append(self._choice.logprobs(logits, of_piece, num_likeliest, numbers[: len(of_piece)]))
        return _PositionsOfDevice(found, count)


class _PositionsOfDevice:
    """Log-probabilities at N positions that a device computes, in pieces."""

    def __init__(self, pieces: list[RowLogprobs], count: int) -> None:
        names = ("maxima", "token_ids", "logprobs", "ranks")
        self._copies = [HostCopy(torch.cat([getattr(piece, name) for piece in pieces])) for name in names]
        self._count = count

    @property
    def have_arrived(self) -> bool:
        return all(copy.has_arrived for copy in self._copies)

    def error(self) -> str | None:
        return _error_of(self._copies[0].wait().numpy())

    def logprobs(self) -> list[PositionLogprobs]:
        token_ids, logprobs, ranks = (copy.wait() for copy in self._copies[1:])
        return list(of_device(token_ids, logprobs, ranks, np.full(len(ranks), self._count)))


def _error_of(maxima: Float32Array) -> str | None:
    """Return the error of logits whose rows have these largest ones [R], if one is not finite."""
    unsound = np.flatnonzero(~np.isfinite(maxima))
    return nonfinite_error(maxima[unsound[0]]) if unsound.size else None


def _pieces(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
