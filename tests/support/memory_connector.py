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
from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.blocks.prompt_blocks import BlockIds, PromptBlocks, Save
from quire.kv.connectors.host_blocks import BlockStore, ByteArray, block_store
from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.status import RequestStatus

if TYPE_CHECKING:
    import torch

    from quire.step import IntArray, SchedulerOutput


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
    blocks: list[tuple[BlockKey, BlockIds]]
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
        by_group: whether there may be several cache groups.
    """

    def __init__(
        self,
        block_size: int,
        *,
        capacity_bytes: int = 1 << 30,
        load_steps: int = 0,
        send_steps: int | None = None,
        keeps_tails: bool = False,
        by_group: bool = False,
    ) -> None:
        self.by_group = by_group
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
        self._stores: list[BlockStore] = []  # of each group
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
        self, request: Request, block_ids: Sequence[int] | IntArray, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if not num_external_tokens:
            return
        first = self._num_local[request_id] // self._block_size
        keys = self._keys_of(request)
        indices = range(first, first + -(-num_external_tokens // self._block_size))
        by_block = np.atleast_2d(block_ids).T.tolist()
        blocks = [(keys[index], tuple(by_block[index])) for index in indices]
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
        self, request: Request, block_ids: Sequence[int] | IntArray
    ) -> tuple[bool, Mapping[str, Any] | None]:
        request_id = request.request_id
        self._keys.pop(request_id, None)
        self._num_local.pop(request_id, None)
        self._prompts.forget(request_id)
        is_complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if self._send_steps is None or not (is_complete and np.size(block_ids)):
            return False, None
        self._new_sends.append(request_id)
        return True, {"request_id": request_id, "block_ids": np.asarray(block_ids).tolist()}

    @override
    def lends_prompt(self, request: Request) -> bool:
        return self._send_steps is not None

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
    def register_kv_caches(self, kv_caches: Any) -> None:
        """Anything with `read_block` and `write_block` will do."""
        self._stores = [block_store(cache) for cache in (kv_caches if self.by_group else [kv_caches])]

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
        self._require_stores()
        for save in self._saves:
            if save.request_id in failed_ids or not self._bad_blocks.isdisjoint(save.trusted_block_ids):
                continue
            self._bad_blocks.difference_update(ids[0] for _, ids in save.blocks)
            for key, ids in save.blocks:
                if self.store.get(key) is None and NULL_BLOCK not in ids[1:]:
                    self.store.put(key, self._content(ids))
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
        is_usable = load.generation == self.store.generation
        for key, ids in load.blocks:
            content = self.store.get(key) if is_usable else None
            if content is None:
                self._failed_blocks.add(ids[0])
                self._bad_blocks.add(ids[0])
            else:
                self._bad_blocks.discard(ids[0])
                self._fill(ids, content)

    def _content(self, ids: BlockIds) -> ByteArray:
        """Return what all groups have of a block."""
        parts = [np.empty(store.bytes_per_block, dtype=np.uint8) for store in self._stores]
        for store, block_id, part in zip(self._stores, ids, parts, strict=True):
            store.read_block(block_id, part)
        return np.concatenate(parts)

    def _fill(self, ids: BlockIds, content: ByteArray) -> None:
        """Overwrite a block in the groups that have it."""
        ends = np.cumsum([store.bytes_per_block for store in self._require_stores()])
        parts = np.split(content, ends[:-1])
        for group, (store, block_id, part) in enumerate(zip(self._stores, ids, parts, strict=True)):
            if block_id != NULL_BLOCK or not group:
                store.write_block(block_id, part)

    def _require_stores(self) -> list[BlockStore]:
        if not self._stores:
            raise RuntimeError("register_kv_caches() must be called before KV is loaded or saved")
        return self._stores


def _is_due(pending: _PendingLoad) -> bool:
    pending.steps_left -= 1
    return pending.steps_left == 0
