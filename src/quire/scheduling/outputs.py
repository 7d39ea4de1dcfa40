"""What the scheduler hands to the front end after a step: messages, ready to be encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, QuireError
from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
from quire.status import FinishReason
from quire.step import GraphStats, PositionLogprobs


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is new about one request. With a `finish_reason` it is the request's one terminal output.

    `error` tells what was wrong when `finish_reason` is "error"; `error_type` names the class in
    `quire.errors` it belongs to, if it does, and `error_param` the request's field at fault, if one is.
    `num_cached_tokens` counts prompt tokens found in the prefix cache, or loaded from elsewhere, when the
    request was first admitted, and `first_scheduled_time` is when that was, in seconds on the scheduler's
    clock, the system's monotonic one; both come with the first output. `pooled` is the row of a request that
    is pooled, as the bytes of [hidden] float32.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    error: str | None = None
    error_type: str = ""
    cumulative_logprob: float | None = None  # of a beam search's hypothesis, nats
    kv_transfer_params: Mapping[str, Any] | None = None  # where the request's KV can be had, from a connector
    error_param: str | None = None
    pooled: bytes | None = None


def error_fields(param: str | None) -> tuple[str, str | None]:
    """Return `error_type` and `error_param` of an error that the request's parameter `param` causes."""
    return "" if param is None else InvalidRequestError.__name__, param


def grammar_error_fields(error: QuireError) -> tuple[str, str | None]:
    """Return `error_type` and `error_param` of a request that has ended because of its grammar."""
    return error_fields("structured_outputs" if isinstance(error, InvalidRequestError) else None)


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
    prefix_queried_tokens: int = 0  # prompt tokens looked up at requests' first start, siblings' once
    prefix_hit_tokens: int = 0  # of those, found; loaded ones are `num_loaded_tokens`
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0  # of those
    num_timeouts: int = 0
    num_loaded_tokens: int = 0  # prompt tokens whose KV came from elsewhere
    num_failed_loads: int = 0
    num_leased_blocks: int = 0  # held by pins and transfers
    num_awaiting: int = 0  # of those that wait: until a grammar is compiled, or KV is found or has come
    resumed_queried_tokens: int = 0  # tokens of preempted requests looked up when they started again
    resumed_hit_tokens: int = 0  # of those, found
    kv_connector: KVConnectorStats | KVPeerStats | None = None  # what the KV connector counts, if anything
    num_loading: int = 0  # of those that await something: until KV has come from elsewhere
    num_evicted_blocks: int = 0  # that sequences have given back while they ran, see `CacheEvictionConfig`
    num_replaced_policies: int = 0  # that failed, so that the default has taken their place
    num_idle_blocks: int = 0  # of the free ones, those that the prefix cache still finds
    prefix_evicted_blocks: int = 0  # idle ones whose content has made room for other content
    graphs: GraphStats | None = None  # how the runner computes steps, if it records them

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """One step's outputs for one client."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
