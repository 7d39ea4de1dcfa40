"""The measurements of a request, and their summary over many requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request from its client's view; times are seconds since the run began.

    Args:
        arrived: when it was due.
        sent: when it was sent; later than `arrived` if the concurrency limit was reached.
        output_times: when each output with new tokens was received.
        ended: when it finished or failed.
        num_prompt_tokens: prompt tokens.
        num_cached_tokens: prompt tokens whose KV was in the prefix cache.
        num_output_tokens: tokens generated.
        output_len: tokens requested.
        error: why it failed; None if it did not.
    """

    arrived: float
    num_prompt_tokens: int
    output_len: int
    sent: float = 0.0
    output_times: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first output."""
        return self.output_times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.output_times[-1] - self.output_times[0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between outputs, each of which has one or more new tokens."""
        return [
            later - earlier for earlier, later in zip(self.output_times, self.output_times[1:], strict=False)
        ]

    @property
    def latency(self) -> float:
        """End-to-end latency: from sending to the end."""
        return self.ended - self.sent

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether `ttft`, `tpot` and `latency` meet the objectives (seconds) given for them."""
        found = {name: getattr(self, name) for name in objectives}
        return all(value is None or value <= objectives[name] for name, value in found.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return dataclasses.asdict(self)


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile (linear interpolation); None without values."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    median, p90, p99 = np.percentile(array, [50, 90, 99]).tolist()
    return {"mean": float(array.mean()), "median": median, "p90": p90, "p99": p99}


def rates(num_requests: int, input_tokens: int, output_tokens: int, seconds: float) -> dict[str, float]:
    """Return requests, output tokens and all tokens per second."""
    return {
        "requests_per_second": num_requests / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (input_tokens + output_tokens) / seconds,
    }


def served_figures(records: Sequence[RequestRecord], objectives: Mapping[str, float]) -> dict[str, Any]:
    """Return the results of a run under load. Times are in seconds; failed requests are left out.

    Goodput is requests per second that meet all objectives (Zhong et al., DistServe, OSDI 2024).
    """
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    seconds = max(record.ended for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in done)
    output_tokens = sum(record.num_output_tokens for record in done)
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "ended_early": sum(record.num_output_tokens < record.output_len for record in done),
        "seconds": seconds,
        "input_tokens": prompt_tokens,
        "cached_tokens": sum(record.num_cached_tokens for record in done),
        "output_tokens": output_tokens,
        **rates(len(done), prompt_tokens, output_tokens, seconds),
    }
    if objectives:
        figures["goodput_requests_per_second"] = sum(record.meets(objectives) for record in done) / seconds
    tpots = [tpot for record in done if (tpot := record.tpot) is not None]
    return {
        **figures,
        "ttft_seconds": summary(record.ttft for record in done),
        "tpot_seconds": summary(tpots),
        "itl_seconds": summary(gap for record in done for gap in record.itl),
        "latency_seconds": summary(record.latency for record in done),
    }
