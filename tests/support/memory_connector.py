"""A KV connector to a dictionary whose loads and sends take a given number of steps, and no threads.

It keeps the full blocks of prompts by their chained keys, so a prompt that comes again is loaded instead of
computed even after the engine's own cache has dropped it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.prompt_blocks import PromptBlocks, Save
from quire.kv.connectors.host_blocks import BlockStore, ByteArray, block_store
from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.status import RequestStatus

if TYPE_CHECKING:
    import torch

    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.step import SchedulerOutput


class HostBlocks:
    """Block contents by key, least recently used dropped first.

    `generation` counts how often everything was forgotten: what was found in one generation may not be used
    in another, because the weights may have changed between them.

    Args:
        capacity_bytes: maximum number of bytes to keep.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.generation = 0
        self.num_bytes = 0
        self._capacity = capacity_bytes
        self._contents: OrderedDict[bytes, tuple[BlockKey, ByteArray]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: BlockKey) -> bool:
        entry = self._contents.get(key.digest)
        return entry is not None and entry[0] == key

    def get(self, key: BlockKey) -> ByteArray | None:
        """Return the content of `key` and count it as used, or None."""
        if key not in self:
            return None
        self._contents.move_to_end(key.digest)
        return self._contents[key.digest][1]

    def put(self, key: BlockKey, content: ByteArray) -> None:
        """Keep a content, at the cost of the least recently used ones; one that is too large is not kept."""
        if key.digest in self._contents or content.nbytes > self._capacity:
            return
        self._contents[key.digest] = (key, content)
        self.num_bytes += content.nbytes
        while self.num_bytes > self._capacity:
            _, (_, dropped) = self._contents.popitem(last=False)
            self.num_bytes -= dropped.nbytes

    def clear(self) -> None:
        """Forget everything and begin a new generation."""
        self._contents.clear()
        self.num_bytes = 0
        self.generation += 1


@dataclasses.dataclass(slots=True, frozen=True)
class BlockLoad:
    """Blocks to fill for one request, from what was stored in `generation`."""

    request_id: str
    blocks: list[tuple[BlockKey, int]]
    generation: int


@dataclasses.dataclass(slots=True, frozen=True)
class MemoryConnectorMetadata:
    """What one step means for the worker side."""

    generation: int
    loads: list[BlockLoad]
    cancelled: list[str]  # requests whose load is given up
    saves: list[Save]
    sends: list[str]  # requests whose blocks a peer reads from now on


@dataclasses.dataclass(slots=True)
class _PendingLoad:
    load: BlockLoad
    steps_left: int


class MemoryConnector(KVConnector):
    """Keeps prompts' KV in host memory.

    Args:
        block_size: tokens per block.
        capacity_bytes: maximum number of bytes to keep; the least recently used blocks are dropped.
        load_steps: steps that an asynchronous load takes, at least 1; 0 loads synchronously.
        send_steps: steps for which a finished request's blocks are held for a peer; None sends nothing.
        keeps_tails: whether to keep all tokens of a prompt but the last, and not only full blocks.
    """

    def __init__(
        self,
        block_size: int,
        *,
        capacity_bytes: int = 1 << 30,
        load_steps: int = 0,
        send_steps: int | None = None,
        keeps_tails: bool = False,
    ) -> None:
        self.store = HostBlocks(capacity_bytes)
        self._block_size = block_size
        self._load_steps = load_steps
        self._send_steps = send_steps
        self._keeps_tails = keeps_tails
        # Scheduler side.
        self._prompts = PromptBlocks(block_size)
        self._keys: dict[str, SequenceKeys] = {}
        self._num_local: dict[str, int] = {}  # tokens that each request had when it was last looked up
        self._new_loads: list[BlockLoad] = []
        self._cancelled: list[str] = []
        self._new_sends: list[str] = []
        # Worker side.
        self._blocks: BlockStore | None = None
        self._pending: dict[str, _PendingLoad] = {}
        self._saves: list[Save] = []
        self._sending: dict[str, int] = {}  # steps left
        self._failed_blocks: set[int] = set()  # to be reported
        self._bad_blocks: set[int] = set()  # not filled since a load of them failed

    # -- scheduler side ------------------------------------------------------------------------------------

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._num_local[request.request_id] = num_computed_tokens
        if num_computed_tokens % self._block_size:
            return 0, False
        keys = self._keys_of(request)
        index = num_computed_tokens // self._block_size
        # The last token is always computed, for its logits.
        last = min(len(keys), -(-(request.num_tokens - 1) // self._block_size))
        if not self._keeps_tails:
            last = min(last, (request.num_tokens - 1) // self._block_size)
        while index < last and keys[index] in self.store:
            index += 1
        num_found = min(index * self._block_size, keys.num_tokens) - num_computed_tokens
        return num_found, num_found > 0 and self._load_steps > 0

    @override
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if not num_external_tokens:
            return
        first = self._num_local[request_id] // self._block_size
        keys = self._keys_of(request)
        indices = range(first, first + -(-num_external_tokens // self._block_size))
        blocks = [(keys[index], int(block_ids[index])) for index in indices]
        self._new_loads.append(BlockLoad(request_id, blocks, self.store.generation))

    @override
    def cancel_load(self, request_id: str) -> None:
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        self._cancelled.append(request_id)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryConnectorMetadata:
        metadata = MemoryConnectorMetadata(
            self.store.generation,
            self._new_loads,
            self._cancelled,
            self._prompts.completed_by(scheduler_output, self._keys),
            self._new_sends,
        )
        self._new_loads, self._cancelled, self._new_sends = [], [], []
        return metadata

    @override
    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        request_id = request.request_id
        self._keys.pop(request_id, None)
        self._num_local.pop(request_id, None)
        self._prompts.forget(request_id)
        is_complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if self._send_steps is None or not (is_complete and len(block_ids)):
            return False, None
        self._new_sends.append(request_id)
        return True, {"request_id": request_id, "block_ids": [int(block_id) for block_id in block_ids]}

    @override
    def leases_renewed(self) -> frozenset[str]:
        """The peer asks at every opportunity."""
        return frozenset(self._sending)

    @override
    def reset(self) -> bool:
        """Loads under way fail, saves under way are dropped."""
        self.store.clear()
        return True

    def _keys_of(self, request: Request) -> SequenceKeys:
        keys = self._keys.get(request.request_id)
        if keys is None:
            root = root_digest(salt=request.cache_salt)
            keys = self._keys[request.request_id] = SequenceKeys(root, self._block_size)
            if self._keeps_tails:
                keys.end_with(request.prompt_array[:-1])
            else:
                keys.extend(request.prompt_array)
        return keys

    # -- worker side ---------------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: PagedAttentionCache | BlockStore) -> None:
        """Anything with `read_block` and `write_block` will do."""
        self._blocks = block_store(kv_caches)

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        """A synchronous load has ended when this returns."""
        if not isinstance(metadata, MemoryConnectorMetadata):
            return
        for request_id in metadata.cancelled:
            self._pending.pop(request_id, None)
        for load in metadata.loads:
            if self._load_steps:
                self._pending[load.request_id] = _PendingLoad(load, self._load_steps)
            else:
                self._complete(load)
        if metadata.generation == self.store.generation:
            self._saves = metadata.saves
        self._sending.update(dict.fromkeys(metadata.sends, self._send_steps or 0))

    @override
    def wait_for_layer_load(self, layer: int) -> None:
        """All layers are there already."""

    @override
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Blocks are copied whole by `wait_for_save`."""

    @override
    def wait_for_save(self, failed_ids: frozenset[str]) -> None:
        """What was computed from blocks that failed to load is not kept either."""
        blocks = self._require_blocks()
        for save in self._saves:
            if save.request_id in failed_ids or not self._bad_blocks.isdisjoint(save.trusted_block_ids):
                continue
            self._bad_blocks.difference_update(block_id for _, (block_id,) in save.blocks)
            for key, (block_id,) in save.blocks:
                if self.store.get(key) is None:
                    content = np.empty(blocks.bytes_per_block, dtype=np.uint8)
                    blocks.read_block(block_id, content)
                    self.store.put(key, content)
        self._saves = []

    @override
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Each call is one step of the loads and sends under way."""
        received = [request_id for request_id, pending in self._pending.items() if _is_due(pending)]
        for request_id in received:
            self._complete(self._pending.pop(request_id).load)
        left = {request_id: steps_left - 1 for request_id, steps_left in self._sending.items()}
        sent = [request_id for request_id, steps_left in left.items() if steps_left <= 0]
        self._sending = {request_id: steps_left for request_id, steps_left in left.items() if steps_left > 0}
        return frozenset(sent), frozenset(received)

    @override
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def _complete(self, load: BlockLoad) -> None:
        """Fill a load's blocks; those whose content is no longer stored are noted as failed."""
        blocks = self._require_blocks()
        is_usable = load.generation == self.store.generation
        for key, block_id in load.blocks:
            content = self.store.get(key) if is_usable else None
            if content is None:
                self._failed_blocks.add(block_id)
                self._bad_blocks.add(block_id)
            else:
                self._bad_blocks.discard(block_id)
                blocks.write_block(block_id, content)

    def _require_blocks(self) -> BlockStore:
        if self._blocks is None:
            raise RuntimeError("register_kv_caches() must be called before KV is loaded or saved")
        return self._blocks


def _is_due(pending: _PendingLoad) -> bool:
    pending.steps_left -= 1
    return pending.steps_left == 0
