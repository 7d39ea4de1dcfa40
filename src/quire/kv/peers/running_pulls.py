"""Running reads from peers into this engine's cache: the worker side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.datadist.wire import sockets
from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVPeerStats
from quire.kv.connectors.step_times import StepMark
from quire.kv.peers.peer import KnownPeers
from quire.kv.peers.pulls import LoanLoad, PeerPull, PrefixLoad

PREFIX_GRACE = 1.0
"""Seconds for a cached prefix to come, besides `PREFIX_PATIENCE` times as long as it takes to compute."""

PREFIX_PATIENCE = 2.0


class RunningPulls:
    """Begins and cancels pulls, and reports how they have ended.

    Args:
        peers: to read from.
        timeout: seconds for KV to come.
        stats: stats of the connector.
        costs: costs of loading and computing.
    """

    def __init__(self, peers: KnownPeers, timeout: float, *, stats: KVPeerStats, costs: LoadCosts) -> None:
        self._peers = peers
        self._timeout = min(timeout, sockets.MAX_WAIT)  # peers are told it in milliseconds
        self._stats = stats
        self._costs = costs
        self._pulls: dict[str, PeerPull] = {}
        self._failed_block_ids: set[int] = set()  # to be reported

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def num_blocks(self) -> int:
        """Blocks that are being read; any thread may ask."""
        return sum(pull.load.num_blocks for pull in list(self._pulls.values()))

    def begin_step(
        self, loads: Sequence[LoanLoad | PrefixLoad], cancelled: Sequence[str], after: StepMark
    ) -> None:
        """Cancel pulls by request, and begin others: steps before a mark may still use their blocks."""
        for request_id in cancelled:
            pull = self._pulls.pop(request_id, None)
            if pull is not None:
                pull.cancel()
        for load in loads:
            self._pulls[load.request_id] = self._begin(load, after)

    def finished(self) -> frozenset[str]:
        """Return the requests whose pull has ended since the last call."""
        received = [request_id for request_id, pull in self._pulls.items() if pull.has_ended]
        for request_id in received:
            pull = self._pulls.pop(request_id)
            if pull.has_failed:
                self._stats.num_failed_loads += 1
                self._failed_block_ids.update(pull.load.block_ids[0].tolist())
            else:
                self._note_read(pull)
        return frozenset(received)

    def failed_block_ids(self) -> frozenset[int]:
        """Return the blocks that could not be read since the last call."""
        failed, self._failed_block_ids = frozenset(self._failed_block_ids), set()
        return failed

    def close(self) -> None:
        """Give up all pulls."""
        for pull in self._pulls.values():
            pull.cancel()

    def _begin(self, load: LoanLoad | PrefixLoad, after: StepMark) -> PeerPull:
        pull = PeerPull(load, time.monotonic() + self._patience(load), after)
        peer = self._peers.find(load.address)
        if peer is None:
            pull.end(has_failed=True)
        else:
            peer.pull(pull)
        return pull

    def _patience(self, load: LoanLoad | PrefixLoad) -> float:
        """Return the seconds for a load to come: less for what was only to be quicker than computing."""
        computing = self._costs.seconds_to_compute(load.num_blocks)
        if isinstance(load, LoanLoad) or not computing:
            return self._timeout
        return min(self._timeout, PREFIX_GRACE + PREFIX_PATIENCE * computing)

    def _note_read(self, pull: PeerPull) -> None:
        num_blocks = pull.load.num_blocks
        self._stats.num_loaded_blocks += num_blocks
        self._stats.loaded_bytes += pull.num_bytes
        if pull.load.is_ready:
            self._costs.note_load(pull.seconds, num_blocks)
