"""A `MemoryConnector` with a bad network: loads fail or stay silent, and peers die, when a test says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from typing_extensions import override

from memory_connector import BlockLoad, MemoryConnector, MemoryConnectorMetadata
from quire.kv.blocks.block_hash import BlockKey

NOWHERE = BlockKey(b"", b"", b"")  # the key of nothing that is ever stored
NEVER = 1 << 30  # steps


class FaultyConnector(MemoryConnector):
    """Does what a `MemoryConnector` does, but for the faults that a test asks for.

    Args:
        is_peer_alive: a dead peer neither reads what is sent nor asks to keep it.
    """

    def __init__(self, block_size: int, *, is_peer_alive: bool = True, **options) -> None:
        super().__init__(block_size, **options)
        self.is_peer_alive = is_peer_alive
        self._failures: list[int] = []  # of the next loads: how many of their blocks load
        self._num_silent = 0  # of the next loads
        self._silent: set[str] = set()

    def fail_next_loads(self, count: int, *, num_good_blocks: int = 0) -> None:
        """Let the next `count` loads fail, each after its first `num_good_blocks` blocks."""
        self._failures += [num_good_blocks] * count

    def never_answer_next_loads(self, count: int) -> None:
        """Let the next `count` asynchronous loads stay silent until `answer()`."""
        self._num_silent += count

    def answer(self) -> None:
        """Let all silent loads end with the next step."""
        self._num_silent = 0
        for request_id in self._silent & self._pending.keys():
            self._pending[request_id].steps_left = 1
        self._silent.clear()

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        if not isinstance(metadata, MemoryConnectorMetadata):
            return
        loads = [self._spoiled(load) for load in metadata.loads]
        super().start_load_kv(dataclasses.replace(metadata, loads=loads))
        self._silent.difference_update(metadata.cancelled)
        for load in loads:
            self._silent.discard(load.request_id)
            if self._num_silent and load.request_id in self._pending:
                self._num_silent -= 1
                self._silent.add(load.request_id)
                self._pending[load.request_id].steps_left = NEVER

    def _spoiled(self, load: BlockLoad) -> BlockLoad:
        if not self._failures:
            return load
        num_good = self._failures.pop(0)
        lost = [(NOWHERE, block_id) for _, block_id in load.blocks[num_good:]]
        return dataclasses.replace(load, blocks=load.blocks[:num_good] + lost)

    @override
    def leases_renewed(self) -> frozenset[str]:
        return super().leases_renewed() if self.is_peer_alive else frozenset()

    @override
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        sent, received = super().get_finished(finished_ids)
        if not self.is_peer_alive:  # nobody will ever tell how those ended
            self._sending.clear()
            sent = frozenset()
        return sent, received
