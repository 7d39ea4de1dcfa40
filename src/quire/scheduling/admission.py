"""Who is refused at the door: requests that can never be served, and requests beyond the queue's bounds."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.errors import InvalidRequestError, QueueFullError
from quire.request import Request
from quire.scheduling.queue import WaitingQueue
from quire.scheduling.slots import token_limit

RETRY_AFTER_SECONDS = 1.0


def refuse_priority_without_policy(request: Request, config: SchedulerConfig) -> None:
    """Raise `InvalidRequestError` for a priority that the policy would not look at."""
    if request.priority and config.policy != "priority":
        raise InvalidRequestError(
            f"priority is {request.priority}, but the scheduler's policy is {config.policy!r}, which has no "
            "priorities; leave it out, or start the engine with policy 'priority'",
            param="priority",
        )


def refuse_if_never_fits(
    request: Request, config: SchedulerConfig, num_blocks: int, max_model_len: int
) -> None:
    """Raise `InvalidRequestError` for a request that even an idle engine could not serve to its end."""
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token", param="prompt")
    if request.num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {request.num_prompt_tokens} tokens; at most {max_model_len - 1} leave room for "
            f"output within max_model_len {max_model_len}",
            param="prompt",
        )
    capacity = num_blocks * config.block_size
    most_tokens = token_limit(request, max_model_len)
    if most_tokens > capacity:
        raise InvalidRequestError(
            f"prompt ({request.num_prompt_tokens} tokens) and output could reach {most_tokens} tokens, but "
            f"the whole KV cache holds {capacity}; lower max_tokens to at most "
            f"{max(capacity - request.num_prompt_tokens, 0)}, or raise num_kv_blocks or cache_size",
            param="max_tokens",
        )


def refuse_if_queue_is_full(request: Request, config: SchedulerConfig, waiting: WaitingQueue) -> None:
    """Raise `QueueFullError` if the queue's bounds leave no room for `request`.

    An empty queue takes any request, so that a prompt longer than max_num_queued_tokens can be served.
    """
    if len(waiting) >= config.max_num_queued_reqs:
        raise QueueFullError(
            f"{len(waiting)} requests wait, the bound is max_num_queued_reqs {config.max_num_queued_reqs}",
            retry_after=RETRY_AFTER_SECONDS,
        )
    if len(waiting) and waiting.num_tokens + request.num_tokens > config.max_num_queued_tokens:
        raise QueueFullError(
            f"{waiting.num_tokens} tokens wait and the request has {request.num_tokens}; the bound is "
            f"max_num_queued_tokens {config.max_num_queued_tokens}",
            retry_after=RETRY_AFTER_SECONDS,
        )
