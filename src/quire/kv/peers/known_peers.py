"""The engines that this one reads from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quire.kv.peers.links import LINK_TIMEOUT
from quire.kv.peers.peer import Peer
from quire.kv.peers.transfer_params import Address

MAX_PEERS = 64
"""Peers whose KV is read at a time."""


class KnownPeers:
    """The peers that this engine reads from, by address.

    Args:
        new_peer: returns a peer.
    """

    def __init__(self, new_peer: Callable[[Address], Peer]) -> None:
        self._new_peer = new_peer
        self._peers: dict[Address, Peer] = {}
        self._lock = threading.Lock()

    def find(self, address: Address) -> Peer | None:
        """Return a peer; None: there is no such, or no more."""
        with self._lock:
            return self._peers.get(address)

    def get(self, address: Address) -> Peer | None:
        """Return a peer, maybe a new one in the place of one that is idle; None: there are too many.

        For one thread: a peer that another one has got might be forgotten before it is used.
        """
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                if len(self._peers) >= MAX_PEERS:
                    self._peers = {at: one for at, one in self._peers.items() if not one.is_idle}
                if len(self._peers) >= MAX_PEERS:
                    return None
                peer = self._peers[address] = self._new_peer(address)
            return peer

    def transports(self) -> list[str]:
        """Return the transport to each peer that is linked."""
        with self._lock:
            return [peer.links.transport for peer in self._peers.values() if peer.links.transport]

    def close(self) -> None:
        """End all threads; all pulls have ended or are cancelled."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        deadline = time.monotonic() + LINK_TIMEOUT
        for peer in peers:
            peer.join(deadline)
