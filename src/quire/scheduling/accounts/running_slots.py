"""The running requests as a struct of arrays: one row, called a slot, for each.

A decode step touches every running request, so what it needs is kept in numpy arrays by slot and handled by
vector operations. A `Request` object is brought up to date when it leaves its slot.
"""

from __future__ import annotations

import bisect

import numpy as np

from quire.request import Request
from quire.scheduling.policies.order import OrderKey
from quire.step import NO_TOKEN, BoolArray, IntArray


class RunningSlots:
    """Up to `max_num_seqs` running requests of at most `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.request_ids = np.full(max_num_seqs, "", dtype=np.object_)  # of str
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # known: prompt and output
        self.num_pending = np.zeros(
            max_num_seqs, dtype=np.int32
        )  # sampled by steps that have not been applied
        self.num_computed = np.zeros(
            max_num_seqs, dtype=np.int32
        )  # in the cache once all steps have been applied
        self.num_to_repeat = np.zeros(
            max_num_seqs, dtype=np.int32
        )  # of those, the last ones, which the state of recurrent layers has not taken in
        self.num_evicted = np.zeros(max_num_seqs, dtype=np.int32)  # of those computed: not in the cache
        self.num_drafts = np.zeros(max_num_seqs, dtype=np.int32)  # proposed, to be verified
        self.num_steps_without_drafts = np.zeros(
            max_num_seqs, dtype=np.int32
        )  # to come, of those that it samples in
        self.awaits_tokens = np.zeros(max_num_seqs, dtype=np.bool_)  # of its newest step, before the next
        self.token_limit = np.zeros(max_num_seqs, dtype=np.int32)  # ends when num_tokens reaches it
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # may not stop before num_tokens reaches it
        self.stop_ids = np.full((max_num_seqs, 4), NO_TOKEN, dtype=np.int32)  # widened as needed
        self.priority = np.zeros(max_num_seqs, dtype=np.int64)
        self.flow = np.zeros(max_num_seqs, dtype=np.int32)  # a number that its running requests share
        self.client_index = np.zeros(max_num_seqs, dtype=np.int32)
        self.awaits_first_token = np.zeros(max_num_seqs, dtype=np.bool_)  # its client has had no output yet
        self.is_beam = np.zeros(max_num_seqs, dtype=np.bool_)  # a beam search chooses its tokens
        self.has_grammar = np.zeros(max_num_seqs, dtype=np.bool_)
        self.lends_prompt = np.zeros(max_num_seqs, dtype=np.bool_)  # see `KVConnector.lends_prompt`
        # Zeroed memory is committed when first written: a long max_model_len costs address space only.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.draft_ids = np.full((max_num_seqs, 0), NO_TOKEN, dtype=np.int32)  # widened as needed
        self.occupied = np.zeros(max_num_seqs, dtype=np.bool_)
        self._has_stop_ids = [False] * max_num_seqs
        self._max_model_len = max_model_len
        self._slots: dict[str, int] = {}
        self._flows: dict[str, list[int]] = {}  # number and running requests of each flow
        self._free_flows = list(range(max_num_seqs))
        self._keys: list[OrderKey] = [()] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._order: list[tuple[OrderKey, int]] = []
        self._order_array: IntArray | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_free(self) -> int:
        """Number of slots that can be occupied."""
        return len(self._free)

    def in_order(self) -> IntArray:
        """Return the occupied slots, first to be served first: [running]."""
        if self._order_array is None:
            self._order_array = np.array([slot for _, slot in self._order], dtype=np.int32)
        return self._order_array

    def request_at(self, slot: int) -> Request:
        """Return the request in an occupied slot."""
        request = self.requests[slot]
        if request is None:
            raise ValueError(f"slot {slot} is empty")
        return request

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of a request, or None if it does not run."""
        return self._slots.get(request_id)

    def key_of(self, slot: int) -> OrderKey:
        """Return what the request in a slot is sorted by."""
        return self._keys[slot]

    def num_in_flow(self, flow: str) -> int:
        """Return how many requests of a flow run, each beam of a search counted."""
        return self._flows[flow][1] if flow in self._flows else 0

    def has_flow_of(self, number: int) -> bool:
        """Whether `number` requests of any flow run, or more."""
        if len(self._order) - len(self._flows) < number - 1:
            return False
        return any(num_running >= number for _, num_running in self._flows.values())

    def _enter_flow(self, slot: int, flow: str) -> None:
        if flow not in self._flows:
            self._flows[flow] = [self._free_flows.pop(), 0]
        self._flows[flow][1] += 1
        self.flow[slot] = self._flows[flow][0]

    def _leave_flow(self, flow: str) -> None:
        self._flows[flow][1] -= 1
        if not self._flows[flow][1]:
            self._free_flows.append(self._flows.pop(flow)[0])

    def occupy(self, request: Request, key: OrderKey) -> int:
        """Put a request into a free slot and return it; whatever raises, the slot is still free."""
        slot = self._free[-1]
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        self.token_ids[slot, :num_prompt] = request.prompt_array
        self.token_ids[slot, num_prompt:num_tokens] = request.output_token_ids
        self.num_prompt[slot] = num_prompt
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = request.num_computed_tokens
        self.num_pending[slot] = self.num_drafts[slot] = self.num_evicted[slot] = 0
        self.num_to_repeat[slot] = 0
        self.num_steps_without_drafts[slot] = 0
        self.token_limit[slot] = token_limit(request, self._max_model_len)
        self.min_tokens[slot] = num_prompt + request.sampling_params.min_tokens
        self.client_index[slot] = request.client_index
        self.priority[slot] = request.priority
        self.awaits_first_token[slot] = not request.output_token_ids
        self.has_grammar[slot] = self.is_beam[slot] = self.lends_prompt[slot] = False
        self._set_stop_ids(slot, request)
        bisect.insort(self._order, (key, slot))
        self._free.pop()
        self._enter_flow(slot, request.flow)
        self.requests[slot] = request
        self.request_ids[slot] = request.request_id
        self._slots[request.request_id] = slot
        self._keys[slot] = key
        self.occupied[slot] = True
        self._order_array = None
        return slot

    def leave(self, slot: int) -> Request:
        """Take the request out of its slot, up to date; the slot stays unusable until `free` is called."""
        request = self.update_request(slot)
        self.requests[slot] = None
        self._leave_flow(request.flow)
        del self._slots[request.request_id]
        self.occupied[slot] = False
        self._order.pop(bisect.bisect_left(self._order, (self._keys[slot], slot)))
        self._order_array = None
        return request

    def update_request(self, slot: int) -> Request:
        """Update the `Request` in a slot from the arrays and return it."""
        request = self.request_at(slot)
        num_prompt = request.num_prompt_tokens
        request.output_token_ids = self.token_ids[slot, num_prompt : self.num_tokens[slot]].tolist()
        request.num_computed_tokens = int(self.num_computed[slot])
        return request

    def free(self, slot: int) -> None:
        """Make a slot that was left usable again."""
        self._free.append(slot)

    def next_start(self, slots: IntArray) -> IntArray:
        """Return how many tokens come before the next step of each of `slots`: [slots]."""
        start: IntArray = self.num_computed[slots] - self.num_to_repeat[slots]
        return start

    def append(self, slots: IntArray, token_ids: IntArray) -> None:
        """Add one output token to each of `slots`."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def hits_stop_id(self, slots: IntArray, token_ids: IntArray) -> BoolArray:
        """Return which slots' newest token ends them: [slots]."""
        is_stop: BoolArray = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        return is_stop & (self.num_tokens[slots] > self.min_tokens[slots])

    def hits_limit(self, slots: IntArray) -> BoolArray:
        """Return which slots have all the tokens they may have: [slots]."""
        return self.num_tokens[slots] >= self.token_limit[slots]

    def are_among(self, slots: IntArray, others: list[int]) -> BoolArray:
        """Return which slots are among some others: [slots]."""
        marks = np.zeros(len(self.num_tokens), dtype=bool)
        marks[others] = True
        return marks[slots]

    # -- drafts --------------------------------------------------------------------------------------------

    def propose(self, slots: IntArray, draft_ids: IntArray) -> None:
        """Take drafts ([slots, K], up to the first that is no token), as many as may still become output.

        The last token that a request may have is never a draft: verifying always samples one more.
        """
        width = draft_ids.shape[1]
        if width > self.draft_ids.shape[1]:
            padding = ((0, 0), (0, width - self.draft_ids.shape[1]))
            self.draft_ids = np.pad(self.draft_ids, padding, constant_values=NO_TOKEN)
        room = np.maximum(self.token_limit[slots] - self.num_tokens[slots] - 1, 0)
        count = np.minimum(np.logical_and.accumulate(draft_ids >= 0, axis=1).sum(axis=1), room)
        count[self.num_pending[slots] > 0] = 0  # they guess a position that a step in flight computes
        count[self.num_computed[slots] + 1 < self.num_tokens[slots]] = 0  # most of a prompt comes first
        self.draft_ids[slots, :width] = draft_ids
        self.num_drafts[slots] = count

    def drafts_of(self, slots: IntArray, counts: IntArray) -> IntArray:
        """Return the first `counts` drafts of each slot: [slots, most of them], padded with NO_TOKEN."""
        width = int(counts.max(initial=0))
        if not width:
            return np.empty((len(slots), 0), dtype=np.int32)
        is_draft = np.arange(width) < counts[:, None]
        drafts: IntArray = np.where(is_draft, self.draft_ids[slots, :width], np.int32(NO_TOKEN))
        return drafts

    def _set_stop_ids(self, slot: int, request: Request) -> None:
        params = request.sampling_params
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        stop_ids = (*eos_token_ids, *params.stop_token_ids)
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            padding = ((0, 0), (0, len(stop_ids) - width))
            self.stop_ids = np.pad(self.stop_ids, padding, constant_values=NO_TOKEN)
        if stop_ids or self._has_stop_ids[slot]:
            self.stop_ids[slot] = NO_TOKEN
            self.stop_ids[slot, : len(stop_ids)] = stop_ids
            self._has_stop_ids[slot] = bool(stop_ids)


def token_limit(request: Request, max_model_len: int) -> int:
    """Return the tokens, prompt and output, at which a request ends for its length.

    A prompt that is pooled ends with a row in place of a token, which may be one more than `max_model_len`.
    """
    if request.pooling_params is not None:
        return request.num_prompt_tokens + 1
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(request.num_prompt_tokens + max_tokens, max_model_len)
