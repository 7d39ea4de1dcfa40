"""One sequence, as the scheduler serves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.status import RequestStatus


class Request:
    """One sequence that the scheduler serves: its prompt, its output so far, and its status.

    Args:
        request_id: unique among the engine's live requests.
        prompt_token_ids: at least one token id.
        sampling_params: with `seed` and `max_tokens` set (the front end resolves both).
        eos_token_ids: the model's end-of-sequence ids; ignored with `ignore_eos`.
        priority: lower is served first under the priority policy.
        client_index: which client the outputs go to.
        cache_salt: requests share prefix-cache blocks only with requests of the same salt.
        tenant: whose share of the machine it uses, under the fair policy.
        tenant_weight: how large that share is, relative to others'.
        flow: what it is a part of: a large flow takes turns with others. Empty: it is one by itself.
        timeout: seconds from arrival to its end; None: `SchedulerConfig.request_timeout`.
        queue_timeout: seconds from arrival until it first runs; None: `SchedulerConfig.queue_timeout`.
        pin_prefix: seconds for which its prompt's blocks stay in the prefix cache, even if others want them.
        shares_prompt_with: id of a request with the same prompt, whose computed prompt it waits for.
        kv_transfer_params: what a KV connector needs to know to find the request's KV elsewhere.
        beam_sequence_ids: with beam search, the ids under which the best hypotheses are returned.
        output_token_ids: what it has generated in an engine that has died; it continues from there.
        is_resumed: it was accepted by an engine that has died, and is not refused for a full queue.
        pooling_params: resolved; its prompt becomes a row, and no token is sampled. `sampling_params` is
            `ONE_TOKEN` then: it is scheduled like a request that ends with its first token. None: it
            generates.
        arrival_time: when it came, in seconds on the scheduler's clock, by which it has its place in the
            queue; one that is still to come, such as infinity, is when the scheduler gets it.

    `needs_whole_prompt` says whether what it returns depends on every position of its prompt: then none of
    them may be skipped.

    The scheduler numbers requests as they arrive (`arrival`) and bounds their `arrival_time`. It dates when
    they take their place in the queue (`queued_time`, once it `has_had_place`), and gives new numbers to
    those that have waited for it behind others of their flow. It dates their first admission
    (`first_scheduled_time`), notes which other request's load of KV they wait or have waited for
    (`awaited_load`), counts what of `prompt_logprobs` has been sent to their client (`num_prompt_logprobs`),
    and keeps the tokens of running ones itself: `output_token_ids` and `num_computed_tokens` are up to date
    whenever the request does not run.
    """

    __slots__ = (
        "arrival", "arrival_time", "awaited_load", "beam_sequence_ids", "cache_salt", "client_index",
        "eos_token_ids", "first_scheduled_time", "flow", "has_had_place", "is_known_to_runner",
        "is_resumed", "kv_load_failed", "kv_transfer_params", "needs_whole_prompt", "num_cached_tokens",
        "num_computed_tokens", "num_prompt_logprobs", "num_prompt_tokens", "output_token_ids", "pin_prefix",
        "pooling_params", "priority", "prompt_array", "queue_timeout", "queued_time", "request_id",
        "sampling_params", "shares_prompt_with", "status", "stop_reason", "tenant", "tenant_weight",
        "timeout",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        client_index: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        tenant_weight: float = 1.0,
        flow: str = "",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        pin_prefix: float = 0.0,
        shares_prompt_with: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        beam_sequence_ids: tuple[str, ...] = (),
        output_token_ids: Sequence[int] = (),
        is_resumed: bool = False,
        pooling_params: PoolingParams | None = None,
        arrival_time: float = math.inf,
    ) -> None:
        self.request_id = request_id
        # Not a list: the garbage collector would look at every token again and again.
        self.prompt_array = np.array(prompt_token_ids, dtype=np.int32)
        self.num_prompt_tokens = len(self.prompt_array)
        self.output_token_ids = list(output_token_ids)
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.needs_whole_prompt = sampling_params.prompt_logprobs is not None
        if pooling_params is not None:
            self.needs_whole_prompt = pooling_params.pooling_type != "last"
        self.eos_token_ids = tuple(eos_token_ids)
        self.arrival = 0
        self.priority = priority
        self.client_index = client_index
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.tenant_weight = tenant_weight
        self.flow = flow or request_id
        self.timeout = timeout
        self.queue_timeout = queue_timeout
        self.pin_prefix = pin_prefix
        self.shares_prompt_with = shares_prompt_with
        self.kv_transfer_params = kv_transfer_params
        self.kv_load_failed = False
        self.awaited_load = 0
        self.beam_sequence_ids = beam_sequence_ids
        self.is_resumed = is_resumed
        self.arrival_time = arrival_time
        self.queued_time = 0.0
        self.has_had_place = False
        self.first_scheduled_time: float | None = None
        self.status = RequestStatus.WAITING
        self.is_known_to_runner = False
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        self.stop_reason: int | str | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, a new list; `prompt_array` is the same as an array."""
        ids: list[int] = self.prompt_array.tolist()
        return ids

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return self.prompt_token_ids + self.output_token_ids

    def all_token_array(self) -> npt.NDArray[np.int32]:
        """Return prompt and output: [tokens], not to be written to."""
        if not self.output_token_ids:
            return self.prompt_array
        return np.concatenate((self.prompt_array, np.array(self.output_token_ids, dtype=np.int32)))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"
        )
