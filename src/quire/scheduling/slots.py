"""The running requests as a struct of arrays: one row, called a slot, for each.

A decode step touches every running request, so what it needs is kept in numpy arrays by slot and handled by
vector operations. A `Request` object is brought up to date when it leaves its slot.
"""

from __future__ import annotations

import bisect

import numpy as np

from quire.request import Request
from quire.scheduling.queue import OrderKey
from quire.step import NO_TOKEN, BoolArray, IntArray


class RunningSlots:
    """Up to `max_num_seqs` running requests of at most `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # known: prompt and output
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)  # whose KV is in the cache
        self.token_limit = np.zeros(max_num_seqs, dtype=np.int32)  # ends when num_tokens reaches it
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # may not stop before num_tokens reaches it
        self.stop_ids = np.full((max_num_seqs, 4), NO_TOKEN, dtype=np.int32)  # widened as needed
        # Zeroed memory is committed when first written: a long max_model_len costs address space only.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.occupied = np.zeros(max_num_seqs, dtype=np.bool_)
        self._slots: dict[str, int] = {}
        self._keys: list[OrderKey] = [(0, 0)] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._order: list[tuple[OrderKey, int]] = []
        self._order_array: IntArray | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_free_slot(self) -> bool:
        """Whether another request can run."""
        return bool(self._free)

    def in_order(self) -> IntArray:
        """Return the occupied slots, first to be served first: [running]."""
        if self._order_array is None:
            self._order_array = np.array([slot for _, slot in self._order], dtype=np.int32)
        return self._order_array

    def last(self) -> int:
        """Return the slot that is served last, the first victim of a preemption."""
        return self._order[-1][1]

    def request_at(self, slot: int) -> Request:
        """Return the request in an occupied slot."""
        request = self.requests[slot]
        if request is None:
            raise ValueError(f"slot {slot} is empty")
        return request

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of a request, or None if it does not run."""
        return self._slots.get(request_id)

    def occupy(self, request: Request, key: OrderKey, max_model_len: int) -> int:
        """Put a request into a free slot and return it."""
        slot = self._free.pop()
        tokens = request.all_token_ids
        params = request.sampling_params
        self.requests[slot] = request
        self._slots[request.request_id] = slot
        self._keys[slot] = key
        self.occupied[slot] = True
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = request.num_computed_tokens
        self.token_limit[slot] = token_limit(request, max_model_len)
        self.min_tokens[slot] = request.num_prompt_tokens + params.min_tokens
        self._set_stop_ids(slot, request)
        bisect.insort(self._order, (key, slot))
        self._order_array = None
        return slot

    def leave(self, slot: int) -> Request:
        """Take the request out of its slot, up to date; the slot stays unusable until `free` is called."""
        request = self.request_at(slot)
        num_prompt = request.num_prompt_tokens
        request.output_token_ids = self.token_ids[slot, num_prompt : self.num_tokens[slot]].tolist()
        request.num_computed_tokens = int(self.num_computed[slot])
        self.requests[slot] = None
        del self._slots[request.request_id]
        self.occupied[slot] = False
        self._order.pop(bisect.bisect_left(self._order, (self._keys[slot], slot)))
        self._order_array = None
        return request

    def free(self, slot: int) -> None:
        """Make a slot that was left usable again."""
        self._free.append(slot)

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

    def _set_stop_ids(self, slot: int, request: Request) -> None:
        params = request.sampling_params
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        stop_ids = (*eos_token_ids, *params.stop_token_ids)
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            padding = ((0, 0), (0, len(stop_ids) - width))
            self.stop_ids = np.pad(self.stop_ids, padding, constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


def token_limit(request: Request, max_model_len: int) -> int:
    """Return the tokens, prompt and output, at which a request ends for its length."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(request.num_prompt_tokens + max_tokens, max_model_len)
