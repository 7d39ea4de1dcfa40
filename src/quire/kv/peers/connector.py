"""The KV connector between engines: one lends the prompts that it computes, the other reads them.

Both sides of the connector are in one process, and share what is lent and what is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from quire.datadist.enums import LLMRole
from quire.datadist.interface.options import DEFAULT_TCP_STREAMS, InitOptions
from quire.datadist.interface.session import Session
from quire.datadist.loans.cached_blocks import CachedBlocks
from quire.datadist.loans.loans import Loans
from quire.datadist.loans.shared_blocks import SharedBlocks
from quire.errors import EngineDeadError, InvalidRequestError
from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.events import KVEventSink
from quire.kv.blocks.state_pieces import piece_digests
from quire.kv.connectors.interface import KVConnector
from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVPeerStats
from quire.kv.connectors.step_times import StepMark, StepTimes, host_mark
from quire.kv.peers.block_layouts import layouts_of, memory_of, state_blocks_of
from quire.kv.peers.borrowed_prompts import BorrowedPrompts
from quire.kv.peers.lent_prompts import LentPrompts, answer
from quire.kv.peers.loan_steps import LoanStep, LoanSteps
from quire.kv.peers.peer import KnownPeers, Peer
from quire.kv.peers.peer_prefixes import PeerPrefixes
from quire.kv.peers.pulls import LoanLoad, PrefixLoad, engine_id_of
from quire.kv.peers.running_pulls import RunningPulls
from quire.kv.peers.shared_prompt import StateBlocks
from quire.kv.peers.transfer_params import Address
from quire.request import Request

if TYPE_CHECKING:
    import torch

    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.state_cache import StateCache
    from quire.step import IntArray, SchedulerOutput

ENGINE_CLUSTER_ID = 0
"""The cluster id of every engine: engines know each other by address."""


@dataclasses.dataclass(frozen=True)
class PeerOptions:
    """How an engine reaches its peers.

    Attributes:
        listen_address: IPv4 address and port that peers connect to, if this engine lends; port 0: any.
        asked_addresses: addresses of peers whose prefix caches are searched.
        token: secret that all peers share; empty: none.
        transports: names of those that may be used, the best first.
        identity: returns what the KV is, in named parts; only peers with the same are linked.
        timeout: seconds for the KV of a prompt to come.
        windows: of each cache group but the first, in tokens.
        mark: returns the point behind all steps that a device was asked for so far, in the thread that asks;
            None: steps are computed when they return.
    """

    listen_address: Address | None
    asked_addresses: Sequence[Address]
    token: bytes
    transports: Sequence[str]
    identity: Callable[[], Mapping[str, str]]
    timeout: float
    windows: tuple[int, ...] = ()
    mark: Callable[[], StepMark] | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class PeerMetadata:
    """What one step means for the worker side."""

    num_tokens: int  # computed by the step
    completed: list[LoanStep]
    loads: list[LoanLoad | PrefixLoad]
    cancelled: list[str]


class PeerConnector(KVConnector):
    """Lends prompts' KV to peers, and reads it from them, over the links of a datadist session.

    `kv_transfer_params` of a request say where its KV is, or that it is to be lent. For other requests, peers
    are asked what of their prompts they have cached.

    Attributes:
        kv_events: for all changes of the prefix cache, by cache group; empty: no peer reads it.
        state_events: for all changes of the states that are kept for it; None: no peer reads it.

    Args:
        block_size: tokens per block.
        options: how to reach peers.

    Raises:
        LLMException: LLM_FAILED, the address cannot be listened on.
    """

    by_group = True
    moves_states = True
    saves_before_tokens = True

    def __init__(self, block_size: int, options: PeerOptions) -> None:
        self.works_by_layer = options.mark is None
        self._block_size = block_size
        self._options = options
        self._stats = KVPeerStats()
        self._costs = LoadCosts(block_size)
        self._cancelled: list[str] = []  # requests whose load the next step cancels
        self._times = StepTimes(options.mark or host_mark, self._costs)
        self._started: _Started | None = None
        self._states: StateCache | None = None
        # To be filled by loads that are about to begin, by request, and how many tokens are here already.
        self._checkpoints: dict[str, tuple[int, int]] = {}
        in_windows = [-(-(window - 1) // block_size) for window in options.windows]
        self._cached = CachedBlocks(in_windows, self._state_behind)
        groups = range(1 + len(in_windows)) if options.listen_address is not None else ()
        self.kv_events = tuple(CachedBlockEvents(self._cached, group) for group in groups)
        self.state_events = CachedStateEvents(self._cached, lambda: self._parts.states) if groups else None

    @property
    def address(self) -> Address | None:
        """Where peers connect to; None: this engine lends nothing."""
        return self._parts.address

    def _state_behind(self, digest: bytes) -> Sequence[bytes]:
        return piece_digests(digest, self._parts.states.num_pieces)

    def release(self, transfer_id: str) -> None:
        """End the loan of this transfer id, also if it is offered later: no peer is going to read it."""
        self._parts.loans.release([transfer_id])

    # -- scheduler side ------------------------------------------------------------------------------------

    @override
    def request_arrived(self, request: Request) -> None:
        self._parts.borrowed.arrive(request)
        if self._options.listen_address is None:
            return
        try:
            self._parts.lent.arrive(request)
        except InvalidRequestError:
            self._parts.borrowed.finish(request)
            raise

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        parts = self._parts
        reader = parts.borrowed if parts.borrowed.has(request) else parts.prefixes
        num_tokens = reader.find(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    @override
    def load_state(self, request: Request, checkpoint: int, num_local_tokens: int) -> None:
        self._checkpoints[request.request_id] = checkpoint, num_local_tokens

    @override
    def update_state_after_alloc(
        self, request: Request, block_ids: IntArray, num_external_tokens: int
    ) -> None:
        parts, checkpoint = self._parts, self._checkpoints.pop(request.request_id, None)
        reader = parts.borrowed if parts.borrowed.has(request) else parts.prefixes
        reader.begin(request, block_ids, num_external_tokens, checkpoint)

    @override
    def lends_prompt(self, request: Request) -> bool:
        return self._parts.lent.has(request)

    @override
    def cancel_load(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        self._parts.borrowed.cancel(request_id)
        self._parts.prefixes.cancel(request_id)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PeerMetadata:
        cancelled, self._cancelled = self._cancelled, []
        return PeerMetadata(
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            completed=self._parts.lent.plan(scheduler_output),
            loads=[*self._parts.borrowed.plan(scheduler_output), *self._parts.prefixes.plan()],
            cancelled=cancelled,
        )

    @override
    def lend_state(self, request: Request, checkpoint: int) -> None:
        self._parts.lent.lend_state(request, checkpoint)

    @override
    def request_finished(
        self, request: Request, block_ids: IntArray
    ) -> tuple[bool, Mapping[str, Any] | None]:
        parts = self._parts
        parts.borrowed.finish(request)
        parts.prefixes.finish(request)
        is_held, transfer_id = parts.lent.finish(request, block_ids)
        if transfer_id is None or parts.address is None:
            return False, None
        self._stats.num_lent_prompts += 1
        return is_held, answer(transfer_id, parts.address, engine_id_of(parts.session.epoch))

    @override
    def leases_renewed(self) -> frozenset[str]:
        return frozenset(self._parts.loans.take_renewed())

    @override
    def lease_ended(self, request_id: str) -> None:
        self._parts.lent.end(request_id, "its lease has ended")

    @override
    def reset(self) -> bool:
        """Nothing is stored; what is lent or being read keeps this from being done."""
        parts = self._parts
        begins_to_read = parts.borrowed.begins_to_read or parts.prefixes.begins_to_read
        return parts.loans.is_empty and not begins_to_read and not len(parts.pulls)

    @override
    def stats(self) -> KVPeerStats:
        transports = Counter(self._parts.peers.transports())
        return msgspec.structs.replace(
            self._stats,
            load_seconds_per_block=self._costs.seconds_per_block,
            compute_seconds_per_token=self._costs.seconds_per_token,
            num_peers_by_transport=dict(transports),
        )

    @override
    def close(self) -> None:
        if self._started is not None:
            self._started.close()

    @property
    def _parts(self) -> _Started:
        if self._started is None:
            raise RuntimeError("register_kv_caches() must be called before KV is lent or read")
        return self._started

    # -- worker side ---------------------------------------------------------------------------------------

    @override
    def register_states(self, states: StateCache) -> None:
        self._states = states

    @override
    def register_kv_caches(self, kv_caches: tuple[PagedAttentionCache, ...]) -> None:
        """Begin to listen for peers."""
        self._started = _Started(
            self._block_size,
            self._options,
            kv_caches,
            self._cached,
            states=self._states,
            stats=self._stats,
            costs=self._costs,
        )

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        """Raise `EngineDeadError` if a read that could not be ended may still write anywhere in the cache."""
        if self._parts.memory.is_lost:
            raise EngineDeadError(
                "a read of a peer's KV could not be cancelled, and may still write to the cache; restart the "
                "engine (kv_transports without nixl avoids this)"
            )
        if isinstance(metadata, PeerMetadata):
            began = self._times.begin(metadata.num_tokens)
            self._parts.pulls.begin_step(metadata.loads, metadata.cancelled, began)
            self._parts.loan_steps.begin(metadata.completed)

    @override
    def wait_for_layer_load(self, layer: int) -> None:
        """No step waits for a load."""

    @override
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._parts.loan_steps.advance(self._parts.layouts.layer_ends[layer])

    @override
    def wait_for_save(self, failed_ids: frozenset[str]) -> None:
        self.begin_save(lambda: failed_ids)

    @override
    def begin_save(self, failed_ids: Callable[[], frozenset[str]]) -> None:
        """Lend what the step computes when it has been computed: as long as it is lent, it stays."""
        self._parts.loan_steps.end(failed_ids, self._times.end())

    @override
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset(self._parts.loans.take_released()), self._parts.pulls.finished()

    @override
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return self._parts.pulls.failed_block_ids()


class _Started:
    """What needs the cache: its memory, what is lent of it, and who is linked."""

    def __init__(
        self,
        block_size: int,
        options: PeerOptions,
        kv_caches: Sequence[PagedAttentionCache],
        cached: CachedBlocks,
        *,
        states: StateCache | None,
        stats: KVPeerStats,
        costs: LoadCosts,
    ) -> None:
        self.layouts = layouts_of(kv_caches)
        self.memory = memory_of(kv_caches, states)
        self.states = state_blocks_of(kv_caches, states)
        self.loans = Loans(self.layouts.block_bytes)
        self.loan_steps = LoanSteps(self.loans, are_in_flight=options.mark is not None)
        windows = options.windows
        self.lent = LentPrompts(block_size, self.loans, self.loan_steps, windows=windows, states=self.states)
        self.session = Session(
            LLMRole.DECODER if options.listen_address is None else LLMRole.PROMPT,
            ENGINE_CLUSTER_ID,
            InitOptions(
                address=options.listen_address,
                device=kv_caches[0].tensor.device,
                timeout=options.timeout,
                pool_bytes=0,
                token=options.token,
                use_checksum=True,
                transports=tuple(options.transports),
                num_tcp_streams=DEFAULT_TCP_STREAMS,
            ),
            SharedBlocks(
                memory=self.memory,
                block_size=block_size,
                spans_of=self.layouts.spans_of,
                max_sent_blocks=self.layouts.max_sent_blocks,
                loans=self.loans,
                cached=cached,
                identity=options.identity,
            ),
        )
        service = self.session.service
        self.address = None if service is None else service.address
        self.peers = KnownPeers(functools.partial(self._new_peer, options.timeout))
        self.pulls = RunningPulls(self.peers, options.timeout, stats=stats, costs=costs)
        self.borrowed = BorrowedPrompts(
            block_size,
            self.peers,
            self.pulls,
            windows=windows,
            states=self.states,
            stats=stats,
            costs=costs,
        )
        others = [one for one in options.asked_addresses if one != self.address]
        self.prefixes = PeerPrefixes(
            block_size,
            others,
            self.peers,
            self.pulls,
            windows=windows,
            states=self.states,
            stats=stats,
            costs=costs,
        )

    def close(self) -> None:
        self.loans.close("the engine ends")
        self.pulls.close()
        self.peers.close()
        self.session.close()

    def _new_peer(self, lease_timeout: float, address: Address) -> Peer:
        open_link = functools.partial(self.session.open_link, address)
        return Peer(address, open_link, self.memory, self.layouts, lease_timeout=lease_timeout)


class CachedBlockEvents(KVEventSink):
    """Keeps what peers may read of the prefix cache of a cache group up to date.

    Args:
        cached: what they read.
        group: number of the group.
    """

    def __init__(self, cached: CachedBlocks, group: int) -> None:
        self._cached = cached
        self._group = group

    @override
    def stored(self, block_id: int, key: BlockKey) -> None:
        self._cached.add(key.digest, block_id, self._group)

    @override
    def removed(self, block_id: int, key: BlockKey) -> None:
        self._cached.remove(key.digest, self._group)

    @override
    def cleared(self) -> None:
        self._cached.clear(self._group)

    @override
    def salted(self, root: bytes, salt: str) -> None:
        """Peers know blocks by their digests."""


class CachedStateEvents(KVEventSink):
    """Keeps what peers may read of the states of the prefix cache up to date: their pieces, as blocks.

    Args:
        cached: what they read.
        states: returns where states are.
    """

    def __init__(self, cached: CachedBlocks, states: Callable[[], StateBlocks]) -> None:
        self._cached = cached
        self._states = states

    @override
    def stored(self, block_id: int, key: BlockKey) -> None:
        blocks = self._states().of(block_id)
        for digest, block in zip(piece_digests(key.digest, len(blocks)), blocks, strict=True):
            self._cached.add(digest, block)

    @override
    def removed(self, block_id: int, key: BlockKey) -> None:
        for digest in piece_digests(key.digest, self._states().num_pieces):
            self._cached.remove(digest)

    @override
    def cleared(self) -> None:
        """States go one by one."""

    @override
    def salted(self, root: bytes, salt: str) -> None:
        """Peers know blocks by their digests."""
