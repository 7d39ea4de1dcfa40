"""Prefixes shared within a step: a request leans on blocks that another of the same step is about to fill.

In a forward pass each layer writes the keys and values of all tokens before its attention reads any, so both
may be in one batch. Until the step has been applied, no other step can find the blocks. If the step is lost
or fails, all of its requests go back; if only the one that fills the blocks fails, those that lean on it do.
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
    """Finds the full blocks that the step in the making will fill, and remembers who leans on whom.

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
        self._filler_of: dict[bytes, int] = {}  # slot, by the digest of a block
        self._leaners: dict[int, list[tuple[int, int]]] = {}  # by step: (slot, slot that it leans on)

    def begin(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Begin a step in which running requests get `num_tokens` tokens: [R] each.

        While a step is in flight, none of them is leaned on: what it began to fill there may yet be void.
        """
        self._filler_of.clear()
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
            self._filler_of.setdefault(digest, slot)

    def extended(self, request: Request, prefix: Prefix) -> Prefix:
        """Return a prefix found in the cache, with the blocks behind it that this step will fill.

        At most those before the last token: that one is always computed, for its logits.
        """
        if not self._filler_of or request.needs_whole_prompt:
            return prefix
        num_found = end = prefix.num_full
        last = (request.num_tokens - 1) // self._kv.block_size
        filler = None
        for digest in self._kv.digests(request.request_id, end, last):
            slot = self._filler_of.get(digest)
            if slot is None:
                break
            filler, end = slot, end + 1
        if filler is None or not self._is_same(request, filler, end * self._kv.block_size):
            return prefix
        num_tokens = end * self._kv.block_size
        return dataclasses.replace(prefix, num_tokens=num_tokens, filler=filler, num_filling=end - num_found)

    def _is_same(self, request: Request, slot: int, num_tokens: int) -> bool:
        """Whether the first tokens, and the salts, are really the same, and not only their digests."""
        tokens = request.all_token_array()[:num_tokens]
        same_salt = self._running.request_at(slot).cache_salt == request.cache_salt
        return same_salt and np.array_equal(self._running.token_ids[slot, :num_tokens], tokens)

    def lean(self, slot: int, filler: int) -> None:
        """Note that in this step `slot` uses blocks that `filler` fills."""
        self._leaners.setdefault(self._in_flight.next_step, []).append((slot, filler))

    def leaners_of(self, step: int) -> list[tuple[int, int]]:
        """Return who leans on whom in a step that has not been applied: (slot, slot of the filler) each."""
        return self._leaners.get(step, [])

    def land(self, step: int, failed_slots: Iterable[int]) -> list[int]:
        """Forget who leaned on whom up to a step; return the slots that leaned on a failed one in it."""
        leaners = self.leaners_of(step)
        for past in [number for number in self._leaners if number <= step]:
            del self._leaners[past]
        void = set(failed_slots)
        leaned = []
        for slot, filler in leaners:
            if filler in void:
                void.add(slot)
                leaned.append(slot)
        return leaned
