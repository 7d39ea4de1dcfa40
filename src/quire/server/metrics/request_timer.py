"""Observing metrics from the outputs of a request."""

from __future__ import annotations

import time

from quire.errors import InvalidRequestError, QueueFullError, RequestTimeoutError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.metrics.registry import EndLabel, Metrics
from quire.server.tenancy.metrics import TenantFigures
from quire.status import FinishReason

_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class RequestTimer:
    """Turns the outputs of one engine request into observations.

    Its time is divided without gaps: from arrival to the first admission to a step (queue), from there to the
    first token of any sequence (prefill), and from there to the last token of any (decode). If an engine
    dies, the time until another continues belongs to the interrupted part.

    Use as a context manager around the request: an exception that leaves it counts as the end of unfinished
    sequences.

    Args:
        metrics: the server's metrics.
        tenant: metrics of the request's tenant.
        num_sequences: number of completions of the prompt.
    """

    def __init__(self, metrics: Metrics, tenant: TenantFigures, num_sequences: int) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._unfinished = set(range(num_sequences))
        self._start = time.monotonic()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._num_tokens = [0] * num_sequences
        self._first_time = [0.0] * num_sequences
        self._last_time = [0.0] * num_sequences

    def __enter__(self) -> RequestTimer:
        self._tenant.num_requests += 1
        self._tenant.num_waiting += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._first_token is None:
            self._tenant.num_waiting -= 1
        else:
            self._tenant.num_running -= 1
        if self._unfinished:
            self._metrics.finished.labels(_end_label(error)).inc(len(self._unfinished))

    def observe(self, output: RequestOutput) -> None:
        """Observe the new part of a cumulative output."""
        now = time.monotonic()
        for completion in output.outputs:
            num_new = len(completion.token_ids) - self._num_tokens[completion.index]
            if num_new:
                if self._first_token is None:
                    self._observe_first_token(output, now)
                self._observe_tokens(completion.index, num_new, now)
            if completion.finish_reason is not None and completion.index in self._unfinished:
                self._observe_end(completion)
        if output.finished:
            self._observe_whole(output, now)

    def _observe_first_token(self, output: RequestOutput, now: float) -> None:
        metrics, tenant = self._metrics, self._tenant
        self._first_token = now
        tenant.num_waiting -= 1
        tenant.num_running += 1
        metrics.time_to_first_token.observe(now - self._start)
        if output.first_scheduled_time is not None:
            # Read in another process: keep times non-negative whatever its clock says.
            self._scheduled = min(max(output.first_scheduled_time, self._start), now)
            metrics.queue_time.observe(self._scheduled - self._start)
            metrics.prefill_time.observe(now - self._scheduled)

    def _observe_tokens(self, index: int, num_new: int, now: float) -> None:
        if self._num_tokens[index]:
            self._metrics.inter_token_latency.observe((now - self._last_time[index]) / num_new, num_new)
        else:
            self._first_time[index] = now
        self._num_tokens[index] += num_new
        self._last_time[index] = now
        self._metrics.generation_tokens.inc(num_new)
        self._tenant.num_generated_tokens += num_new

    def _observe_end(self, completion: CompletionOutput) -> None:
        index, metrics = completion.index, self._metrics
        self._unfinished.discard(index)
        is_timeout = completion.error_type == RequestTimeoutError.__name__
        metrics.finished.labels("timeout" if is_timeout else str(completion.finish_reason)).inc()
        num_tokens = self._num_tokens[index]
        metrics.sequence_tokens.observe(num_tokens)
        decode_time = self._last_time[index] - self._first_time[index]
        if decode_time:  # unlike a beam search's, tokens arrived separately
            metrics.time_per_output_token.observe(decode_time / (num_tokens - 1))

    def _observe_whole(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        metrics.request_duration.observe(now - self._start)
        metrics.request_tokens.observe(len(output.prompt_token_ids))
        if all(one.finish_reason in _ANSWERED for one in output.outputs):
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            self._tenant.num_prompt_tokens += len(output.prompt_token_ids)
        if self._first_token is None:
            return
        last_token = max(self._last_time)
        metrics.decode_time.observe(last_token - self._first_token)
        if self._scheduled is not None:
            metrics.inference_time.observe(last_token - self._scheduled)


def _end_label(error: BaseException | None) -> EndLabel:
    """Return the end label of unfinished sequences after `error`; None: their client has left."""
    match error:
        case InvalidRequestError() | QueueFullError():
            return "refused"
        case RequestTimeoutError():
            return "timeout"
        case Exception():
            return "error"
        case _:  # none, a cancellation, or a closed generator
            return "abort"
