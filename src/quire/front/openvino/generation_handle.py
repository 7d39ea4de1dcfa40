"""`GenerationHandle`: reads or ends a request of `ContinuousBatchingPipeline.add_request`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

from quire.errors import InvalidRequestError
from quire.front.openvino.results import (
    GenerationFinishReason,
    GenerationOutput,
    GenerationStatus,
    PerfMetrics,
)
from quire.front.text.output_processor import CompletionState, RequestState
from quire.request_output import CompletionOutput, TokenLogprobs
from quire.status import FinishReason


class GenerationHandle:
    """A request of the pipeline. Only `ContinuousBatchingPipeline.step` advances it; reading does not.

    Args:
        state: state of the request.
        end: aborts the request.
        echoed_token_ids: prepended to each completion.
        load_time: load time of the model, in seconds.
    """

    def __init__(
        self,
        state: RequestState,
        end: Callable[[RequestState], None],
        echoed_token_ids: list[int],
        load_time: float,
    ) -> None:
        self._state = state
        self._end = end
        self._echoed = echoed_token_ids
        self._load_time = load_time
        self._num_read = [0] * len(state.completions)
        self._ended_by: GenerationStatus | None = None
        self._reason_of_end = GenerationFinishReason.STOP

    def get_status(self) -> GenerationStatus:
        """Return the status of the request."""
        if self._ended_by is not None:
            return self._ended_by
        if self._state.failure is not None:
            return GenerationStatus.IGNORED
        return status_of([completion.finish_reason for completion in self._state.completions])

    def can_read(self) -> bool:
        """Whether there are tokens that `read` has not returned."""
        return any(
            len(completion.token_ids) > self._num_read[completion.index] for completion in self._completions()
        )

    def read(self) -> dict[int, GenerationOutput]:
        """Return the tokens since the last call, by completion; completions without any are left out."""
        fresh = {}
        for completion in self._completions():
            start = self._num_read[completion.index]
            if len(completion.token_ids) > start:
                fresh[completion.index] = self._output(completion, start)
                self._num_read[completion.index] = len(completion.token_ids)
        return fresh

    def read_all(self) -> list[GenerationOutput]:
        """Return all tokens so far of each completion, read or not, including the echoed prompt."""
        return [self._output(completion, 0) for completion in self._completions()]

    def get_perf_metrics(self) -> PerfMetrics:
        """Return the times and token counts known so far; most are known once the request has ended."""
        snapshot = self._state.snapshot()
        return PerfMetrics.of(
            snapshot.metrics, load_time=self._load_time, num_input_tokens=len(snapshot.prompt_token_ids)
        )

    def get_vlm_perf_metrics(self) -> Never:
        """Raise `InvalidRequestError`: no request has images or videos."""
        raise InvalidRequestError("get_vlm_perf_metrics: images and videos are not supported")

    def stop(self, finish_reason: GenerationFinishReason = GenerationFinishReason.STOP) -> None:
        """End the request and keep its output; completions that were running have `finish_reason`."""
        if self.get_status() is GenerationStatus.RUNNING:
            self._reason_of_end = finish_reason
        self._end_as(GenerationStatus.STOP)

    def drop(self) -> None:
        """End the request and keep its output: the older name of `stop`."""
        self.stop()

    def cancel(self) -> None:
        """End the request and discard its output."""
        self._end_as(GenerationStatus.CANCEL)

    def _end_as(self, status: GenerationStatus) -> None:
        if self.get_status() is GenerationStatus.RUNNING:
            self._ended_by = status
            self._end(self._state)

    def _completions(self) -> list[CompletionState]:
        return [] if self._ended_by is GenerationStatus.CANCEL else self._state.completions

    def _output(self, completion: CompletionState, start: int) -> GenerationOutput:
        token_ids = completion.token_ids[start:]
        logprobs = None if completion.logprobs is None else completion.logprobs[start:]
        params = self._state.processed.params
        return GenerationOutput(
            generated_ids=token_ids if start else [*self._echoed, *token_ids],
            generated_log_probs=chosen_logprobs(token_ids, logprobs),
            score=score_of(completion, params.length_penalty if params.beam_width else 0.0),
            finish_reason=self._finish_reason(completion),
            error=completion.error,
        )

    def _finish_reason(self, completion: CompletionState) -> GenerationFinishReason:
        if completion.finish_reason is None and self._ended_by is not None:
            return self._reason_of_end
        return GenerationFinishReason.of(completion.finish_reason)


def status_of(reasons: Sequence[FinishReason | None]) -> GenerationStatus:
    """Return the status of a request from the finish reasons of its completions (None: running)."""
    if None in reasons:
        return GenerationStatus.RUNNING
    if FinishReason.ERROR in reasons:
        return GenerationStatus.IGNORED
    return GenerationStatus.STOP if FinishReason.ABORT in reasons else GenerationStatus.FINISHED


def score_of(completion: CompletionState | CompletionOutput, length_penalty: float) -> float:
    """Return the sum of log-probabilities / length ^ `length_penalty` (0 without beam search)."""
    total = completion.cumulative_logprob or 0.0
    score: float = total / max(len(completion.token_ids), 1) ** length_penalty
    return score


def chosen_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> list[float]:
    """Return the log-probability of each token, in nats; empty if they were not requested."""
    if logprobs is None:
        return []
    return [entry[token_id].logprob for entry, token_id in zip(logprobs, token_ids, strict=True)]
