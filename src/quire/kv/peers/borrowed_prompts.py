"""The side that borrows: prompts whose KV is read from the peer that has computed it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVPeerStats
from quire.kv.peers.peer import MAX_PEERS, KnownPeers, Peer
from quire.kv.peers.pulls import LoanLoad
from quire.kv.peers.running_pulls import RunningPulls
from quire.kv.peers.shared_prompt import (
    StateBlocks,
    firsts_moved,
    lendable_digest,
    moved_blocks,
    num_lendable_tokens,
)
from quire.kv.peers.transfer_params import BorrowingParams, borrowing_params
from quire.request import Request
from quire.step import IntArray, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Borrowed:
    params: BorrowingParams
    peer: Peer | None  # None: there are too many
    num_blocks: int  # of the loan
    num_local: int = 0  # tokens that the cache had when the request was last looked up
    prefers_reading: bool | None = None  # None: not decided yet
    is_over: bool = False  # it was read, or is not to be


class BorrowedPrompts:
    """Reads what a peer lends of prompts: all tokens but the last; with states, full blocks and a state.

    Args:
        block_size: tokens per block.
        peers: to read from.
        pulls: those that run.
        windows: of each cache group but the first, in tokens.
        states: where states are.
        stats: stats of the connector.
        costs: costs of loading and computing.
    """

    def __init__(
        self,
        block_size: int,
        peers: KnownPeers,
        pulls: RunningPulls,
        *,
        windows: Sequence[int],
        states: StateBlocks,
        stats: KVPeerStats,
        costs: LoadCosts,
    ) -> None:
        self._block_size = block_size
        self._peers = peers
        self._pulls = pulls
        self._windows = windows
        self._states = states
        self._stats = stats
        self._costs = costs
        self._borrowed: dict[str, _Borrowed] = {}
        self._new_loads: list[LoanLoad] = []

    @property
    def begins_to_read(self) -> bool:
        """Whether the next step begins to read anything."""
        return bool(self._new_loads)

    def arrive(self, request: Request) -> None:
        """Keep the loan that a request names alive, if it names one.

        A request that goes on after its engine has died needed its loan before, and has given it back.

        Raises:
            InvalidRequestError: its parameters are invalid.
        """
        params = borrowing_params(request.kv_transfer_params)
        if params is None or request.output_token_ids:
            return
        peer = self._peers.get(params.address)
        num_tokens = num_lendable_tokens(request, self._block_size, self._states)
        num_blocks = -(-num_tokens // self._block_size)
        self._borrowed[request.request_id] = _Borrowed(params, peer, num_blocks)
        if peer is None:
            logger.warning("KV is already read from %d peers, the maximum", MAX_PEERS)
        else:
            is_offered = bool(params.remote_engine_id)
            peer.keep(params.transfer_id, request.request_id, is_offered=is_offered)

    def has(self, request: Request) -> bool:
        """Return whether a request names a peer."""
        return request.request_id in self._borrowed

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond the first `num_computed_tokens` are to be read."""
        borrowed = self._borrowed.get(request.request_id)
        if borrowed is None or borrowed.is_over or num_computed_tokens % self._block_size:
            return 0
        peer = borrowed.peer
        if peer is None or peer.has_ended(borrowed.params.transfer_id):
            logger.warning("request %r: its prompt is computed here, the peer has no KV", request.request_id)
            self._stats.num_missing_prompts += 1
            self._give_back(request.request_id)
            return 0
        borrowed.num_local = num_computed_tokens
        num_tokens = num_lendable_tokens(request, self._block_size, self._states) - num_computed_tokens
        if num_tokens < self._block_size:  # to compute those takes no longer than the last token alone
            return 0
        num_blocks = borrowed.num_blocks - num_computed_tokens // self._block_size
        num_blocks += self._states.num_pieces
        return num_tokens if self._prefers_reading(borrowed, num_blocks) else 0

    def _prefers_reading(self, borrowed: _Borrowed, num_blocks: int) -> bool:
        """Return the cheaper choice, made once for a request.

        A prompt that the peer still computes is always read: computing it here, too, would not end sooner.
        """
        if borrowed.prefers_reading is None:
            borrowed.prefers_reading = not borrowed.params.remote_engine_id or self._costs.prefers_loading(
                num_blocks, self._pulls.num_blocks
            )
            self._stats.num_computations_chosen += not borrowed.prefers_reading
        return borrowed.prefers_reading

    def begin(
        self,
        request: Request,
        block_ids: IntArray,
        num_external_tokens: int,
        state: tuple[int, int] | None,
    ) -> None:
        """Read a loan into blocks [G, N] with the next step.

        With a state, that goes into the checkpoint `state[0]`, and `state[1]` tokens are here already.
        """
        borrowed = self._borrowed.get(request.request_id)
        if borrowed is None or borrowed.is_over or not num_external_tokens:
            return
        borrowed.is_over = True
        first = (borrowed.num_local if state is None else state[1]) // self._block_size
        num_tokens = num_lendable_tokens(request, self._block_size, self._states)
        firsts = firsts_moved(self._windows, num_tokens, self._block_size)
        targets = moved_blocks(block_ids[:, first : borrowed.num_blocks], first, firsts)
        pieces = () if state is None else self._states.of(state[0])
        load = LoanLoad(
            request.request_id, borrowed.params, num_tokens, lendable_digest(request), targets, tuple(pieces)
        )
        self._new_loads.append(load)
        self._stats.num_loads_chosen += 1

    def cancel(self, request_id: str) -> None:
        """Stop reading a loan."""
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        self._give_back(request_id)

    def plan(self, output: SchedulerOutput) -> list[LoanLoad]:
        """Return the loads that begin with a step; what the step begins to compute reads nothing more."""
        if self._borrowed:
            for new in output.scheduled_new_reqs:
                self._give_back(new.request_id)
            for resumed in output.scheduled_cached_reqs.resumed:
                self._give_back(resumed.request_id)
        loads, self._new_loads = self._new_loads, []
        return loads

    def finish(self, request: Request) -> None:
        """Note that a request has ended."""
        self._give_back(request.request_id)
        self._borrowed.pop(request.request_id, None)

    def _give_back(self, request_id: str) -> None:
        borrowed = self._borrowed.get(request_id)
        if borrowed is None:
            return
        borrowed.is_over = True
        if borrowed.peer is not None:
            borrowed.peer.give_back(borrowed.params.transfer_id, request_id)
