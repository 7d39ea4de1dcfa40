"""From the outputs of a request to observations."""

from __future__ import annotations

import time

from quire.errors import InvalidRequestError, QueueFullError, RequestTimeoutError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.metrics import EndLabel, Metrics


class RequestTimer:
    """Turns the outputs of one engine request into observations.

    Use as a context manager around the request: what it is left with becomes the end of the sequences that
    have none of their own.
    """

    def __init__(self, metrics: Metrics, num_sequences: int) -> None:
        self._metrics = metrics
        self._unfinished = set(range(num_sequences))
        self._start = time.perf_counter()
        self._first_seen = False
        self._num_tokens = [0] * num_sequences
        self._last_time = [0.0] * num_sequences

    def __enter__(self) -> RequestTimer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._unfinished:
            self._metrics.finished.labels(_end_label(error)).inc(len(self._unfinished))

    def observe(self, output: RequestOutput) -> None:
        """Account for what is new in a cumulative output."""
        now = time.perf_counter()
        for completion in output.outputs:
            num_new = len(completion.token_ids) - self._num_tokens[completion.index]
            if num_new:
                self._observe_tokens(completion.index, num_new, now)
            if completion.finish_reason is not None and completion.index in self._unfinished:
                self._observe_end(completion)
        if output.finished:
            self._metrics.request_duration.observe(now - self._start)
            self._metrics.prompt_tokens.inc(len(output.prompt_token_ids))

    def _observe_tokens(self, index: int, num_new: int, now: float) -> None:
        metrics = self._metrics
        if not self._first_seen:
            self._first_seen = True
            metrics.time_to_first_token.observe(now - self._start)
        if self._num_tokens[index]:
            gap = (now - self._last_time[index]) / num_new
            for _ in range(num_new):
                metrics.inter_token_latency.observe(gap)
        self._num_tokens[index] += num_new
        self._last_time[index] = now
        metrics.generation_tokens.inc(num_new)

    def _observe_end(self, completion: CompletionOutput) -> None:
        self._unfinished.discard(completion.index)
        is_timeout = completion.error_type == RequestTimeoutError.__name__
        self._metrics.finished.labels("timeout" if is_timeout else str(completion.finish_reason)).inc()


def _end_label(error: BaseException | None) -> EndLabel:
    """Return what `error` means for sequences that have not ended; None: nobody waits for them any more."""
    match error:
        case InvalidRequestError() | QueueFullError():
            return "refused"
        case RequestTimeoutError():
            return "timeout"
        case Exception():
            return "error"
        case _:  # none, a cancellation, or a generator that is closed
            return "abort"
