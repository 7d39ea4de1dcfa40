"""Where the time of a request went, as Ollama's answers say it."""

from __future__ import annotations

import time

from quire.request_output import RequestOutput


class Durations:
    """The times of one request, which arrives now."""

    def __init__(self) -> None:
        self._arrival = time.monotonic()
        self._start: float | None = None  # of its first step
        self._first_token: float | None = None

    def observe(self, output: RequestOutput) -> None:
        """Note when it is that the request has begun, and when it has a token."""
        if self._first_token is None and any(completion.token_ids for completion in output.outputs):
            self._start = output.first_scheduled_time
            self._first_token = time.monotonic()

    def fields(self) -> dict[str, int]:
        """Return the durations up to now in nanoseconds, by Ollama's names.

        Until its first step, a request is tokenized and waits. Those that clients divide by are not 0.
        """
        end = time.monotonic()
        first_token = end if self._first_token is None else self._first_token
        start = self._arrival if self._start is None else self._start
        return {
            "total_duration": _nanoseconds(end - self._arrival),
            "load_duration": _nanoseconds(start - self._arrival),
            "prompt_eval_duration": max(1, _nanoseconds(first_token - start)),
            "eval_duration": max(1, _nanoseconds(end - first_token)),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
