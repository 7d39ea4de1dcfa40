"""Requests whose KV is on its way from elsewhere, and the blocks that it is being written to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from quire.kv.manager import NO_PREFIX, Prefix
from quire.request import Request
from quire.step import IntArray


@dataclasses.dataclass(slots=True)
class RemoteLoad:
    """One asynchronous load: `block_ids` will hold the request's first `num_tokens` tokens."""

    request: Request
    block_ids: IntArray  # [blocks]
    num_local_blocks: int  # of them, from the start, were in the prefix cache
    num_tokens: int
    deadline: float  # seconds on the scheduler's clock
    failed_block_ids: frozenset[int] = frozenset()
    has_arrived: bool = False

    def drop_failed(self, block_size: int) -> IntArray:
        """Cut the load off at its first failed block; return the blocks that are no longer of use."""
        failed = np.flatnonzero(np.isin(self.block_ids, list(self.failed_block_ids)))
        if not failed.size:
            return NO_PREFIX.block_ids
        dropped = self.block_ids[failed[0] :]
        self.block_ids = self.block_ids[: failed[0]]
        self.num_tokens = len(self.block_ids) * block_size
        return dropped

    def prefix(self) -> Prefix:
        """Return what has arrived as the start of the request's tokens; its blocks have their reference."""
        return Prefix(self.block_ids, self.num_tokens, is_held=True)


class RemoteLoads:
    """All loads whose request does not run yet, by request id: on their way, or arrived."""

    def __init__(self) -> None:
        self._loads: dict[str, RemoteLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def __iter__(self) -> Iterator[RemoteLoad]:
        return iter(self._loads.values())

    def begin(self, load: RemoteLoad) -> None:
        """Add a load that has been asked for."""
        self._loads[load.request.request_id] = load

    def get(self, request_id: str) -> RemoteLoad | None:
        """Return the load of a request, if it has one."""
        return self._loads.get(request_id)

    def pop(self, request_id: str) -> RemoteLoad | None:
        """Forget a load and return it, if there is one."""
        return self._loads.pop(request_id, None)

    def on_their_way(self) -> list[RemoteLoad]:
        """Return the loads that have not arrived."""
        return [load for load in self._loads.values() if not load.has_arrived]

    def arrived(self) -> list[RemoteLoad]:
        """Return the loads that have arrived and whose request is in the queue, oldest first."""
        return [load for load in self._loads.values() if load.has_arrived]

    def held(self) -> Iterator[int]:
        """Yield the blocks of all loads, with repetition: each is one reference."""
        for load in self._loads.values():
            yield from load.block_ids.tolist()
