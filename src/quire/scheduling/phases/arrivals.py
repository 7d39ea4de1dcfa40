"""How requests arrive: what can never be served is refused, everything else is numbered and waits."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from quire.kv.eviction.lengths import EvictionLengths
from quire.request import Request
from quire.request_options import require_text
from quire.scheduling.accounts.accounts import Accounts
from quire.scheduling.accounts.running_slots import token_limit
from quire.scheduling.phases.timeouts import TimeoutPhase


@dataclasses.dataclass(eq=False)
class Arrivals:
    """Lets requests in."""

    accounts: Accounts
    timeouts: TimeoutPhase

    def add(self, request: Request) -> None:
        """Let a request in, see `SchedulerInterface.add_request`."""
        accounts = self.accounts
        self._refuse(request)
        now = accounts.waiting.number(request)
        try:
            accounts.kv.register(request.request_id, request.prompt_array, request.cache_salt)
            self.timeouts.start(request, now)
            accounts.waiting.enter(request)
        except BaseException:
            self._take_back(request)
            raise

    def _take_back(self, request: Request) -> None:
        """Forget a request that could not be let in to the end."""
        accounts = self.accounts
        request_id = request.request_id
        accounts.waiting.remove(request_id)
        accounts.grammars.forget(request_id)
        accounts.deadlines.forget(request_id)
        accounts.kv.forget(request_id)
        accounts.connector.finish(request, accounts.kv.no_prefix.block_ids)

    def _refuse(self, request: Request) -> None:
        """Raise the error about a request that cannot be served, or not now."""
        accounts, request_id = self.accounts, request.request_id
        if accounts.find(request_id) is not None or accounts.holdings.has_lease(request_id):
            raise DuplicateRequestError(
                f"request id {request_id!r} is in use by a request that has not ended, or whose KV is still "
                "held for a transfer",
                param="request_id",
            )
        require_text(request.cache_salt, "cache_salt")
        require_text(request.tenant, "tenant")
        _refuse_ids_out_of_range(request)
        accounts.grammars.refuse_without_backend(request)
        _refuse_unread_priority(request, accounts)
        _refuse_if_never_fits(request, accounts)
        if request.sampling_params.beam_width:
            _refuse_beams_beside_eviction(request, accounts)
            _refuse_if_beams_never_fit(request, accounts)
        if not request.is_resumed:
            _refuse_if_queue_is_full(request, accounts)
        accounts.connector.arrive(request)


def _refuse_unread_priority(request: Request, accounts: Accounts) -> None:
    """Raise `InvalidRequestError` for a priority if none of the policies reads priorities."""
    if request.priority and not accounts.reads_priority:
        raise InvalidRequestError(
            f"priority is {request.priority}, but the scheduler's policy is {accounts.config.policy!r}, "
            "which has no priorities; leave it out, or start the engine with policy or prefix_retention "
            "'priority'",
            param="priority",
        )


def _refuse_ids_out_of_range(request: Request) -> None:
    """Raise `InvalidRequestError` for token ids that no vocabulary has: 32 bits are kept of each."""
    most = np.iinfo(np.int32).max
    ids = {
        "stop_token_ids": request.sampling_params.stop_token_ids,
        "eos_token_ids": request.eos_token_ids,
        "output_token_ids": request.output_token_ids,
    }
    for name, token_ids in ids.items():
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= most):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= most)
            raise InvalidRequestError(
                f"{name} contains {wrong}, which is no token id; the limit is {most}", param=name
            )


def _refuse_beams_beside_eviction(request: Request, accounts: Accounts) -> None:
    """Raise `InvalidRequestError` for a beam search if sequences evict KV."""
    if accounts.config.use_cache_eviction:
        raise InvalidRequestError(
            f"beam_width is {request.sampling_params.beam_width}, but use_cache_eviction is on: beams share "
            "KV blocks, of which each would evict others; leave beam_width out, or start the engine without "
            "use_cache_eviction",
            param="beam_width",
        )


def _refuse_if_never_fits(request: Request, accounts: Accounts) -> None:
    """Raise `InvalidRequestError` for a request that even an idle engine could not serve to its end."""
    config, max_model_len = accounts.config, accounts.max_model_len
    num_prompt = request.num_prompt_tokens
    if not num_prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token", param="prompt")
    longest = max_model_len if request.pooling_params is not None else max_model_len - 1
    if num_prompt > longest:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; at most {longest} leave room for what it returns within "
            f"max_model_len {max_model_len}",
            param="prompt",
        )
    if not config.dynamic_split_fuse and num_prompt > config.max_num_batched_tokens:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens, but without dynamic_split_fuse, as for any model that is "
            "not causal, a prompt must fit into one step of max_num_batched_tokens "
            f"{config.max_num_batched_tokens}; raise that, or turn dynamic_split_fuse on for a causal model",
            param="prompt",
        )
    capacity = accounts.kv.pools.first.num_blocks * config.block_size
    most_tokens = _max_kv_tokens(request, max_model_len)
    if accounts.eviction is not None:
        _refuse_if_never_held(num_prompt, most_tokens, capacity, accounts.eviction.lengths)
        return
    if most_tokens > capacity:
        raise InvalidRequestError(
            f"prompt ({num_prompt} tokens) and output could reach {most_tokens + 1} tokens, of "
            f"which all but the last need KV, but the KV cache holds {capacity}; lower max_tokens to at "
            f"most {max(capacity + 1 - num_prompt, 0)}, or raise num_kv_blocks or cache_size",
            param="max_tokens",
        )


def _max_kv_tokens(request: Request, max_model_len: int) -> int:
    """Return the most tokens whose KV a request needs: all but its last, which nothing follows."""
    return token_limit(request, max_model_len) - 1


def _refuse_if_never_held(
    num_prompt: int, most_tokens: int, capacity: int, eviction: EvictionLengths
) -> None:
    """Raise `InvalidRequestError` if a request holds more tokens at once than there is room for."""
    max_held = int(eviction.max_held(np.array(num_prompt), np.array(most_tokens)))
    if max_held > capacity:
        raise InvalidRequestError(
            f"prompt ({num_prompt} tokens) and output could hold {max_held} tokens at once, with what is "
            f"evicted left out, but the KV cache holds {capacity}; lower max_cache_size or shorten the "
            "prompt, or raise num_kv_blocks or cache_size",
            param="max_tokens" if num_prompt <= capacity else "prompt",
        )


def _refuse_if_beams_never_fit(request: Request, accounts: Accounts) -> None:
    """Raise `InvalidRequestError` for a beam search whose beams could not all run at once."""
    config, num_blocks = accounts.config, accounts.kv.pools.first.num_blocks
    width = request.sampling_params.beam_width
    if width > config.max_num_seqs:
        raise InvalidRequestError(
            f"beam_width is {width}, but at most max_num_seqs {config.max_num_seqs} sequences run at once; "
            "lower beam_width, or raise max_num_seqs",
            param="beam_width",
        )
    block_size = config.block_size
    num_shared = request.num_prompt_tokens // block_size
    num_own = -(-_max_kv_tokens(request, accounts.max_model_len) // block_size) - num_shared
    if num_shared + width * num_own > num_blocks:
        raise InvalidRequestError(
            f"{width} beams could need {num_shared + width * num_own} KV blocks, {num_shared} for the prompt "
            f"and {num_own} each, but the whole cache has {num_blocks}; lower beam_width or max_tokens, or "
            "raise num_kv_blocks or cache_size",
            param="beam_width",
        )


def _refuse_if_queue_is_full(request: Request, accounts: Accounts) -> None:
    """Raise `QueueFullError` if the queue's bounds leave no room for `request`.

    An empty queue takes any request, so that a prompt longer than max_num_queued_tokens can be served.
    """
    config, waiting = accounts.config, accounts.waiting
    num_waiting, retry_after = len(waiting), waiting.drain_rate.retry_after
    excess_requests = num_waiting + 1 - config.max_num_queued_reqs
    excess_tokens = waiting.num_tokens + request.num_tokens - config.max_num_queued_tokens
    if excess_requests > 0:
        raise QueueFullError(
            f"{num_waiting} requests wait, the bound is max_num_queued_reqs {config.max_num_queued_reqs}",
            retry_after=retry_after(excess_requests, max(excess_tokens, 0)),
        )
    if num_waiting and excess_tokens > 0:
        raise QueueFullError(
            f"{waiting.num_tokens} tokens wait and the request has {request.num_tokens}; the bound is "
            f"max_num_queued_tokens {config.max_num_queued_tokens}",
            retry_after=retry_after(0, excess_tokens),
        )
