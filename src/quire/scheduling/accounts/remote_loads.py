"""Requests whose KV is on its way from elsewhere, and the blocks that it is being written to.

A load is shared: requests that begin with the same tokens wait for it, and find its blocks in the prefix
cache when it has arrived. A request waits only if at least half of the load's blocks are for it, too, so that
this takes at most about twice as long as a load of its own. Beside windows all of them must be: the load has
only what the tokens behind it see. So they must beside states: it has only the one behind it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from quire.kv.blocks.block_pools import BlockPools
from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.blocks.manager import Prefix
from quire.request import Request
from quire.step import IntArray


@dataclasses.dataclass(slots=True)
class RemoteLoad:
    """One asynchronous load: `block_ids` will hold the request's first `num_tokens` tokens.

    A group with a window has the blocks that the tokens behind the load see, and until it has arrived those
    that the tokens behind the local blocks see, too.
    """

    request: Request
    block_ids: IntArray  # [G, blocks]
    num_local_blocks: int  # of them, from the start, were in the prefix cache
    num_tokens: int
    num_missing_blocks: int  # that the rest of the request's tokens will need
    deadline: float  # seconds on the scheduler's clock
    first_step: int  # the one that asks for it; what earlier steps report is of another load
    shared_digest: bytes | None = None  # of the last block that others must share; None: it is not shared
    failed_block_ids: frozenset[int] = frozenset()  # of the first group
    has_arrived: bool = False
    number: int = 0  # no other load has it; given by `RemoteLoads`, from 1 on
    checkpoint: int = -1  # pending, for the state behind the load; -1: there is none, or it can be found

    def drop_failed(self, block_size: int, pools: BlockPools) -> IntArray:
        """Cut the load off at its first failed block; return the blocks [G, blocks] that are of no use.

        Where a group lacks what the tokens behind that see, it is cut off before.
        """
        failed = np.flatnonzero(np.isin(self.block_ids[0], list(self.failed_block_ids)))
        if not failed.size:
            return self.block_ids[:, :0]
        end = pools.num_served(self.block_ids[:, : failed[0]] != NULL_BLOCK)
        dropped = self.block_ids[:, end:]
        self.block_ids = self.block_ids[:, :end]
        self.num_local_blocks = min(self.num_local_blocks, end)
        self.num_tokens = end * block_size
        return dropped

    @property
    def num_blocks(self) -> int:
        """Blocks of each group that it holds."""
        return int(self.block_ids.shape[1])

    def prefix(self) -> Prefix:
        """Return what has arrived as the start of the request's tokens; its blocks have their reference."""
        return Prefix(self.block_ids, self.num_tokens, is_held=True)


class RemoteLoads:
    """All loads whose request does not run yet, by request id: on their way, or arrived.

    Loads begin in the order of their deadlines, so that what is due can be found without looking at the rest.
    """

    def __init__(self) -> None:
        self._coming: dict[str, RemoteLoad] = {}
        self._arrived: dict[str, RemoteLoad] = {}
        self._coming_numbers: set[int] = set()
        self._by_shared: dict[bytes, RemoteLoad] = {}  # on their way, by `shared_digest`
        self._num_begun = 0
        self.num_loading_blocks = 0  # that loads on their way may write to
        self.num_missing_blocks = 0  # that their requests will need besides

    def __len__(self) -> int:
        return len(self._coming) + len(self._arrived)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._coming or request_id in self._arrived

    def __iter__(self) -> Iterator[RemoteLoad]:
        return itertools.chain(self._coming.values(), self._arrived.values())

    @property
    def num_loading(self) -> int:
        """Number of loads on their way."""
        return len(self._coming)

    def begin(self, load: RemoteLoad) -> None:
        """Add a load that has been asked for."""
        self._num_begun += 1
        load.number = self._num_begun
        self._coming[load.request.request_id] = load
        self._coming_numbers.add(load.number)
        if load.shared_digest is not None:
            self._by_shared.setdefault(load.shared_digest, load)
        self.num_loading_blocks += load.num_blocks
        self.num_missing_blocks += load.num_missing_blocks

    def arrive(self, load: RemoteLoad) -> None:
        """Note that a load on its way has arrived, and that its request goes to the queue."""
        self._forget_loading(load.request.request_id)
        load.has_arrived = True
        self._arrived[load.request.request_id] = load

    def get(self, request_id: str) -> RemoteLoad | None:
        """Return the load of a request, if it has one."""
        return self._coming.get(request_id) or self._arrived.get(request_id)

    def pop(self, request_id: str) -> RemoteLoad | None:
        """Forget a load and return it, if there is one."""
        return self._forget_loading(request_id) or self._arrived.pop(request_id, None)

    def loading(self) -> Iterator[RemoteLoad]:
        """Iterate over the loads that have not arrived, first due first."""
        return iter(self._coming.values())

    def is_loading(self, number: int) -> bool:
        """Return whether the load of this number is on its way."""
        return number in self._coming_numbers

    def covering(self, digests: Iterable[bytes]) -> RemoteLoad | None:
        """Return a load on its way whose `shared_digest` is one of these."""
        if not self._by_shared:
            return None
        found = None
        for digest in digests:
            found = self._by_shared.get(digest, found)
        return found

    def due(self, now: float) -> list[RemoteLoad]:
        """Return the loads on their way whose deadline is not after `now` (seconds)."""
        return list(itertools.takewhile(lambda load: load.deadline <= now, self._coming.values()))

    def newest_arrived(self, spared: Request | None = None) -> RemoteLoad | None:
        """Return the load that has arrived last, but not that of `spared`; its request is in the queue."""
        arrived = reversed(self._arrived.values())
        return next((load for load in arrived if load.request is not spared), None)

    def held(self) -> Iterator[IntArray]:
        """Yield the blocks of all loads, [G, blocks] of each: each is one reference."""
        for load in self:
            yield load.block_ids

    def _forget_loading(self, request_id: str) -> RemoteLoad | None:
        load = self._coming.pop(request_id, None)
        if load is not None:
            self._coming_numbers.remove(load.number)
            if load.shared_digest is not None and self._by_shared.get(load.shared_digest) is load:
                del self._by_shared[load.shared_digest]
            self.num_loading_blocks -= load.num_blocks
            self.num_missing_blocks -= load.num_missing_blocks
        return load
