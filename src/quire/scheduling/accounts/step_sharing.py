"""Prefixes shared within a step: a request follows another of the same step that fills blocks for it.

In a forward pass each layer writes the keys and values of all tokens before its attention reads any, so both
may be in one batch. Until the step has been applied, no other step can find the blocks. If the step is lost
or fails, all of its requests go back; if only the one that fills the blocks fails, its followers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from quire.kv.blocks.manager import KVCacheManager, Prefix
from quire.request import Request
from quire.scheduling.accounts.cache_eviction import CacheEviction
from quire.scheduling.accounts.running_slots import RunningSlots
from quire.scheduling.accounts.steps_in_flight import StepsInFlight
from quire.step import IntArray


class StepSharing:
    """Finds full blocks that the step being planned will fill, and remembers which slot follows which.

    Args:
        kv: has the digests of the blocks.
        running: has the requests that fill them.
        in_flight: the steps that have not been applied.
        eviction: says which blocks may be shared; None: all.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSlots,
        in_flight: StepsInFlight,
        eviction: CacheEviction | None,
    ) -> None:
        self._kv = kv
        self._running = running
        self._in_flight = in_flight
        self._eviction = eviction
        self._owner_of: dict[bytes, int] = {}  # slot, by the digest of a block
        self._followers: dict[int, list[tuple[int, int]]] = {}  # by step: (slot, slot that it follows)

    def begin(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Begin a step in which running requests get `num_tokens` tokens: [R] each.

        While a step is in flight, none of them is followed: what they fill may yet turn out invalid.
        """
        self._owner_of.clear()
        if self._in_flight:
            return
        running = self._running
        computes_prompt = (num_tokens > 0) & (running.num_computed[slots] < running.num_prompt[slots])
        for row in computes_prompt.nonzero()[0].tolist():
            slot = int(slots[row])
            start = int(running.num_computed[slot])
            self._add(slot, start // self._kv.block_size, start + int(num_tokens[row]))

    def add(self, slot: int, num_computed: int, chunk: int) -> None:
        """Note that the request just admitted to `slot` gets `chunk` tokens behind its computed ones."""
        self._add(slot, self._kv.blocks_for(num_computed), num_computed + chunk)

    def _add(self, slot: int, first_block: int, num_tokens: int) -> None:
        """Make the blocks from `first_block` up to token `num_tokens` findable, as far as they are full."""
        if self._eviction is not None:
            num_tokens = self._eviction.num_findable(num_tokens)
        request_id, end = self._running.request_at(slot).request_id, num_tokens // self._kv.block_size
        for digest in self._kv.digests(request_id, first_block, end):
            self._owner_of.setdefault(digest, slot)

    def extended(self, request: Request, prefix: Prefix) -> Prefix:
        """Return a prefix found in the cache, with the blocks behind it that this step will fill.

        At most those before the last token: that one is always computed, for its logits.
        """
        if not self._owner_of or request.needs_whole_prompt:
            return prefix
        num_found = end = prefix.num_full
        last = (request.num_tokens - 1) // self._kv.block_size
        owner = None
        for digest in self._kv.digests(request.request_id, end, last):
            slot = self._owner_of.get(digest)
            if slot is None:
                break
            owner, end = slot, end + 1
        if owner is None or not self._is_same(request, owner, end * self._kv.block_size):
            return prefix
        num_tokens = end * self._kv.block_size
        return dataclasses.replace(prefix, num_tokens=num_tokens, owner=owner, num_shared=end - num_found)

    def _is_same(self, request: Request, slot: int, num_tokens: int) -> bool:
        """Whether the first tokens, and the salts, are really the same, and not only their digests."""
        tokens = request.all_token_array()[:num_tokens]
        same_salt = self._running.request_at(slot).cache_salt == request.cache_salt
        return same_salt and np.array_equal(self._running.token_ids[slot, :num_tokens], tokens)

    def follow(self, slot: int, owner: int) -> None:
        """Note that in this step `slot` uses blocks that `owner` fills."""
        self._followers.setdefault(self._in_flight.next_step, []).append((slot, owner))

    def followers_of(self, step: int) -> list[tuple[int, int]]:
        """Return the followers in a step that has not been applied: (slot, slot of the owner) each."""
        return self._followers.get(step, [])

    def end_step(self, step: int, failed_slots: Iterable[int]) -> list[int]:
        """Forget the followers of steps up to this one; return the slots that followed a failed one in it."""
        if not self._followers:
            return []
        followers = self.followers_of(step)
        for past in [number for number in self._followers if number <= step]:
            del self._followers[past]
        void = set(failed_slots)
        failed = []
        for slot, owner in followers:
            if owner in void:
                void.add(slot)
                failed.append(slot)
        return failed
