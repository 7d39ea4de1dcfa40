"""Prompts whose beginning a peer has in its prefix cache: it is read from there if that is cheaper."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from quire.datadist.wire.protocol import DIGEST_BYTES, MAX_PREFIX_BLOCKS
from quire.kv.blocks.state_pieces import piece_digests
from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVPeerStats
from quire.kv.peers.peer import KnownPeers, PrefixLookup
from quire.kv.peers.pulls import PrefixLoad
from quire.kv.peers.running_pulls import RunningPulls
from quire.kv.peers.shared_prompt import (
    StateBlocks,
    cacheable_keys,
    firsts_moved,
    moved_blocks,
    num_cacheable_blocks,
)
from quire.kv.peers.transfer_params import Address
from quire.request import Request
from quire.step import IntArray

LOOKUP_PATIENCE = 0.1
"""Seconds that a request waits for peers' answers at most."""

MIN_COMPUTING_TIME = 0.02
"""Seconds of computing below which no peer is asked: asking takes a few milliseconds."""


@dataclasses.dataclass(slots=True)
class _Search:
    lookup: PrefixLookup
    num_local: int = 0  # tokens that the cache had when the request was last looked up
    prefers_reading: bool | None = None  # None: not decided yet
    is_over: bool = False  # it was read


class PeerPrefixes:
    """Asks peers for the part of a prompt that is not cached here, and reads the longest that one has.

    Args:
        block_size: tokens per block.
        addresses: addresses of the peers to ask.
        peers: finds them.
        pulls: those that run.
        windows: of each cache group but the first, in tokens.
        states: where states are.
        stats: stats of the connector.
        costs: costs of loading and computing.
    """

    def __init__(
        self,
        block_size: int,
        addresses: Sequence[Address],
        peers: KnownPeers,
        pulls: RunningPulls,
        *,
        windows: Sequence[int],
        states: StateBlocks,
        stats: KVPeerStats,
        costs: LoadCosts,
    ) -> None:
        self._block_size = block_size
        self._addresses = addresses
        self._peers = peers
        self._pulls = pulls
        self._windows = windows
        self._states = states
        self._stats = stats
        self._costs = costs
        self._searches: dict[str, _Search] = {}
        self._new_loads: list[PrefixLoad] = []

    @property
    def begins_to_read(self) -> bool:
        """Whether the next step begins to read anything."""
        return bool(self._new_loads)

    def find(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens beyond the first `num_computed_tokens` are to be read; None: ask later."""
        if not self._addresses or num_computed_tokens % self._block_size:
            return 0
        search = self._searches.get(request.request_id)
        if search is None:
            search = self._begin_search(request, num_computed_tokens)
        if search is None or search.is_over:
            return 0
        if not search.lookup.is_over:
            return None
        num_blocks = _num_found(search.lookup, num_computed_tokens // self._block_size)
        if not num_blocks or not self._prefers_reading(search, num_blocks):
            return 0
        search.num_local = num_computed_tokens
        return num_blocks * self._block_size

    def begin(
        self,
        request: Request,
        block_ids: IntArray,
        num_external_tokens: int,
        state: tuple[int, int] | None,
    ) -> None:
        """Read what was found into blocks [G, N] with the next step; for `state` see `BorrowedPrompts`."""
        search = self._searches.get(request.request_id)
        if search is None or search.is_over or not num_external_tokens or search.lookup.best is None:
            return
        search.is_over = True
        num_tokens = search.num_local + num_external_tokens
        first = (search.num_local if state is None else state[1]) // self._block_size
        end, start = num_tokens // self._block_size, search.lookup.blocks.start
        digests = search.lookup.digests()[(first - start) * DIGEST_BYTES : (end - start) * DIGEST_BYTES]
        firsts = firsts_moved(self._windows, num_tokens, self._block_size)
        targets = moved_blocks(block_ids[:, first:end], first, firsts)
        pieces = () if state is None else tuple(self._states.of(state[0]))
        digests += b"".join(piece_digests(digests[-DIGEST_BYTES:], len(pieces)))
        address = search.lookup.best[0]
        self._new_loads.append(PrefixLoad(request.request_id, address, digests, targets, pieces))
        self._stats.num_loads_chosen += 1

    def cancel(self, request_id: str) -> None:
        """Read nothing more for a request."""
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]

    def plan(self) -> list[PrefixLoad]:
        """Return the loads that begin with a step."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def finish(self, request: Request) -> None:
        """Note that a request has ended."""
        self._searches.pop(request.request_id, None)

    def _begin_search(self, request: Request, num_computed_tokens: int) -> _Search | None:
        """Ask all peers that are likely to answer; None: it is not worth it."""
        last = num_cacheable_blocks(request, self._block_size)
        first = num_computed_tokens // self._block_size
        blocks = range(first, min(last, first + MAX_PREFIX_BLOCKS - self._states.num_pieces))
        seconds = self._costs.seconds_to_compute(len(blocks))
        if not blocks or 0 < seconds < MIN_COMPUTING_TIME:
            return None
        lookup = PrefixLookup(
            cacheable_keys(request, self._block_size), blocks, time.monotonic() + LOOKUP_PATIENCE
        )
        for address in self._addresses:
            peer = self._peers.get(address)
            if peer is not None:
                peer.look_up(lookup)
        self._stats.num_prefix_lookups += 1
        search = self._searches[request.request_id] = _Search(lookup)
        return search

    def _prefers_reading(self, search: _Search, num_blocks: int) -> bool:
        """Return the cheaper choice, made once for a request."""
        if search.prefers_reading is None:
            self._stats.num_prefixes_found += 1
            num_before = self._pulls.num_blocks + self._states.num_pieces
            search.prefers_reading = self._costs.prefers_loading(num_blocks, num_before)
            self._stats.num_computations_chosen += not search.prefers_reading
        return search.prefers_reading


def _num_found(lookup: PrefixLookup, num_local: int) -> int:
    """Return how many blocks behind the first `num_local` a peer has."""
    best = lookup.best
    if best is None or num_local < lookup.blocks.start:  # what was cached here then has gone since
        return 0
    return max(0, lookup.blocks.start + best[1] - num_local)
