"""What the scheduler hands to the front end after a step: messages, ready to be encoded."""

from __future__ import annotations

import msgspec

from quire.request import FinishReason, Request, RequestStatus
from quire.step import ModelRunnerOutput, PositionLogprobs


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is new about one request. With a `finish_reason` it is the request's one terminal output.

    `error` tells what was wrong when `finish_reason` is "error". `num_cached_tokens` counts prompt tokens
    found in the prefix cache when the request was first admitted.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    error: str | None = None


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler's state after a step, and its counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or idle in the prefix cache: what a new request can have
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """One step's outputs for one client."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None


def output_of(
    request: Request, new_token_ids: list[int], status: RequestStatus | None, runner: ModelRunnerOutput
) -> EngineCoreOutput | None:
    """Return what the front end must hear of a request after a step, or None if nothing is new."""
    request_id = request.request_id
    prompt_logprobs = runner.prompt_logprobs.get(request_id)
    if not new_token_ids and status is None and prompt_logprobs is None:
        return None
    logprobs = runner.logprobs.get(request_id)
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=new_token_ids,
        finish_reason=None if status is None else FinishReason.of(status),
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=None if logprobs is None else logprobs[: len(new_token_ids)],
        prompt_logprobs=prompt_logprobs,
        error=runner.errors.get(request_id),
    )
