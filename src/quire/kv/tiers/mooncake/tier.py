"""A tier in a Mooncake store: a block is one value, which all engines with the same model find."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.state_pieces import piece_keys
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.region import FINGERPRINT_BYTES, RegionLayout
from quire.kv.tiers.mooncake.client import CALL_TIMEOUT, SETUP_TIMEOUT, StoreClient, StoreError, StoreLane
from quire.kv.tiers.residents import ResidentBlocks
from quire.kv.tiers.tier import BlockTier
from quire.kv.tiers.worker_threads import WorkerThreads

MAX_KNOWN_BLOCKS = 65_536
"""Blocks of the store that an engine remembers; some 50 MB."""

MAX_SEARCHED_STATES = 8
"""States of a prefix of which the store may have lost parts before no more are looked for."""

OBJECT_NOT_FOUND = -704
"""What the store answers when it has evicted a block since it was looked up."""


class MooncakeTier(BlockTier):
    """Keeps blocks in a store that many engines share and that evicts by itself.

    `residents` are the blocks known to be there: those stored by this engine, and those that `search` has
    found. A value is a region as on disk, header and payload. It is used only if its header is whole, names
    the very block that is wanted, and vouches for the payload; one that is damaged is removed. After a
    failure, the tier is neither read nor written during a back-off.

    Args:
        client: calls the store.
        layout: layout of the values, with any fingerprint.
        identity: returns what stands for all that the KV depends on, equal on all machines; may take seconds.
        min_uses: uses of a block after which it is stored.
    """

    is_searched = True

    def __init__(
        self, client: StoreClient, layout: RegionLayout, identity: Callable[[], bytes], *, min_uses: int
    ) -> None:
        residents = ResidentBlocks(MAX_KNOWN_BLOCKS, min_uses)
        super().__init__(residents, layout.payload_bytes, layout.region_bytes)
        self._client = client
        self._find_identity = identity
        self._identity = b""  # of the KV; empty: not known yet
        self._secret = b""  # of this engine, once it has forgotten everything
        self._layout = layout
        self._lock = threading.Lock()  # the layout belongs to the generation
        self._is_full = False  # as of the last refresh
        self._searches = WorkerThreads("kv-store-search", 1)
        wait([self._searches.call(self._connect)], SETUP_TIMEOUT)

    def _connect(self) -> None:
        """Join the store; runs in the thread."""
        try:
            if not self._identity:
                identity = self._find_identity()
                with self._lock:
                    self._identity = identity
                    self._set_fingerprint()
            self._client.connect()
        except Exception as error:
            self._client.note_failure(error)

    def _set_fingerprint(self) -> None:
        digest = blake2b(self._identity + self._secret, digest_size=FINGERPRINT_BYTES)
        self._layout = replace(self._layout, fingerprint=digest.digest())

    @property
    @override
    def is_readable(self) -> bool:
        client = self._client
        return (
            bool(self._identity)
            and client.is_connected
            and not client.is_backing_off
            and self._searches.max_run_time() <= CALL_TIMEOUT
        )

    @property
    @override
    def is_writable(self) -> bool:
        return self.is_readable and not self._is_full

    @override
    def search(self, keys: Sequence[BlockKey], num_pieces: int) -> Future[None]:
        generation = self.residents.generation
        return self._searches.call(
            functools.partial(self._search, keys, num_pieces, self._layout, generation)
        )

    def _search(
        self, keys: Sequence[BlockKey], num_pieces: int, layout: RegionLayout, generation: int
    ) -> None:
        """Note which blocks of a prefix the store has, and the deepest whole state; runs in the thread."""
        first_pieces = [piece for key in keys for piece in piece_keys(key, min(num_pieces, 1))]
        with self._client.lane() as lane:
            answer = _are_there([*keys, *first_pieces], layout, lane)
            num_found = self._note(keys, answer[: len(keys)], generation)
            have_state = list(itertools.compress(keys[:num_found], answer[len(keys) :]))
            for key in have_state[: -MAX_SEARCHED_STATES - 1 : -1]:
                pieces = piece_keys(key, num_pieces)
                if self._note(pieces, _are_there(pieces, layout, lane), generation) == num_pieces:
                    break

    def _note(self, keys: Sequence[BlockKey], are_there: Sequence[int], generation: int) -> int:
        """Note which of `keys` the store has, up to the first that it has not; return how many."""
        for index, (key, is_there) in enumerate(zip(keys, are_there, strict=True)):
            place = self.residents.place_of(key)
            if not is_there:
                if place is not None:
                    self.residents.drop(key, place)
                return index
            if place is None:
                place = self.residents.open_place(key, generation)
                if place is None:
                    return index
                self.residents.fill(key, place, generation)
        return len(keys)

    @override
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        layout, place = self._layout, self.residents.place_of(key)
        if place is None or not self.is_readable:
            return False
        is_read = False
        with contextlib.suppress(StoreError), self._client.lane() as lane:
            is_read = self._read(key, layout, into, lane)
        if is_read:
            self._client.note_success()
        else:
            self.residents.drop(key, place)
        return is_read

    def _read(self, key: BlockKey, layout: RegionLayout, into: ByteArray, lane: StoreLane) -> bool:
        num_bytes = layout.header_bytes + layout.payload_bytes
        name = _name(layout, key)
        [num_read] = lane.call("get", [name], num_bytes)
        if num_read == OBJECT_NOT_FOUND:
            return False
        if num_read < 0:
            raise StoreError(f"error {num_read} in place of a block")
        header = layout.parse(lane.memory[: layout.header_bytes].tobytes())
        np.copyto(into, lane.memory[layout.header_bytes : num_bytes])
        if num_read != num_bytes or header is None or header.key != key or not header.vouches_for(into):
            lane.call("remove", [name])
            raise StoreError(f"block {name} was damaged")
        return True

    @override
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        with self._lock:
            layout = self._layout
            place = self.residents.open_place(key, generation) if self.is_writable else None
        if place is None:
            return False
        code: int | None = None
        with contextlib.suppress(StoreError), self._client.lane() as lane:
            num_bytes = layout.header_bytes + layout.payload_bytes
            lane.memory[: layout.header_bytes] = np.frombuffer(layout.header(key, 0, content), np.uint8)
            lane.memory[layout.header_bytes : num_bytes] = content
            [code] = lane.call("put", [_name(layout, key)], num_bytes)
            self._is_full = code != 0
        if code != 0:
            self.residents.free(place, generation)
            return False
        self._client.note_success()
        self.residents.fill(key, place, generation)
        return True

    @override
    def refresh(self) -> None:
        """Connect again if need be."""
        self._is_full = False
        client = self._client
        if not client.is_connected and not client.is_backing_off and not self._searches.max_run_time():
            self._searches.submit(self._connect)

    @override
    def clear(self) -> None:
        """Forget everything, and hide what is stored from now on from other engines, as a disk tier does."""
        with self._lock:
            self._secret = os.urandom(FINGERPRINT_BYTES)
            self._set_fingerprint()
            self.residents.clear()

    @override
    def close(self) -> None:
        self.residents.clear()
        self._client.close()
        self._searches.close(CALL_TIMEOUT)


def _are_there(keys: Sequence[BlockKey], layout: RegionLayout, lane: StoreLane) -> Sequence[int]:
    """Return 1 for each of `keys` that the store has, and 0 for the others."""
    answer = lane.call("exist", [_name(layout, key) for key in keys])
    if any(number not in (0, 1) for number in answer):
        raise StoreError(f"{min(answer)} in answer to a look-up")
    return answer


def _name(layout: RegionLayout, key: BlockKey) -> str:
    return f"quire@{layout.fingerprint.hex()}@{key.digest.hex()}"
