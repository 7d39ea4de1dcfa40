"""The KV connector to a tier: stores prompts' blocks, and loads them when that is cheaper than computing.

With recurrent layers, the states behind blocks are stored, too, in pieces of a block's size. A prefix is
loaded up to the deepest one.

All loads are asynchronous: `BlockReader` has threads read the blocks while other requests compute. Stores are
copied out of the cache at the end of the step that filled them, into a bounded number of buffers, which
`BlockWriter` writes in a thread; while all are in use, nothing is stored. Both sides are in one process, and
share the tier's index.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.blocks.prompt_blocks import BlockIds, PromptBlocks, Save, by_block
from quire.kv.blocks.state_pieces import HeldState, StatePiece, piece_keys, pieces_of, states_held
from quire.kv.connectors.interface import KVConnector
from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVConnectorStats
from quire.kv.connectors.step_times import StepTimes
from quire.kv.tiers.block_copier import BlockCopier, host_copier
from quire.kv.tiers.block_reader import BlockReader
from quire.kv.tiers.block_writer import BlockWriter, FilledBlock
from quire.kv.tiers.file_copy import Identity, restore_prompt, save_prompt
from quire.kv.tiers.loads import BlockLoad, LoadInProgress
from quire.kv.tiers.tier import BlockTier
from quire.kv.tiers.worker_threads import Counters, WorkerThreads
from quire.request import Request

if TYPE_CHECKING:
    import torch

    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.kv.cache.state_cache import StateCache
    from quire.kv.connectors.host_blocks import BlockStore
    from quire.step import IntArray, SchedulerOutput

NUM_READERS = 2
"""Blocks read at a time."""

REFRESH_INTERVAL = 5.0
"""Seconds after which what other processes did to the tier is taken note of."""

MAX_READ_TIME = 5.0
"""Seconds that one read takes when the disk hangs; nothing is loaded then."""

SEARCH_PATIENCE = 0.5
"""Seconds that a request waits at most to learn what a tier has that several machines share."""

CLOSE_TIMEOUT = 30.0
"""Seconds that blocks which wait to be written have at shutdown."""


@dataclasses.dataclass(slots=True, frozen=True)
class TierMetadata:
    """What one step means for the worker side."""

    generation: int
    num_tokens: int  # computed by the step
    cancelled: list[str]  # requests whose load is given up
    loads: list[BlockLoad]
    stores: list[FilledBlock]


@dataclasses.dataclass(slots=True)
class _Lookup:
    """What became of looking up one request."""

    num_local: int = 0  # tokens that the cache had when the request was last looked up
    prefers_loading: bool | None = None  # None: nothing was found yet
    search: Future[None] | None = None
    search_end: float = 0.0  # when it is waited for no longer


class _Opened(NamedTuple):
    tier: BlockTier
    copier: BlockCopier
    reader: BlockReader
    writer: BlockWriter
    times: StepTimes


class TierConnector(KVConnector):
    """Keeps prompts' blocks in a tier, whole ones.

    Attributes:
        copier_of: as given; if None, an engine on a GPU sets it before it registers its cache.

    Args:
        block_size: tokens per block.
        open_tier: returns the tier for blocks of a given number of bytes; called once the cache exists.
        readers: threads that read; None: `NUM_READERS` of its own.
        writer: the thread that writes; None: its own.
        clock: returns seconds.
        copier_of: returns the copier of the caches that are registered, given the clock and, if there are
            any, the states; None: that of caches in host memory.
    """

    works_by_layer = False
    by_group = True
    moves_states = True
    saves_before_tokens = True

    def __init__(
        self,
        block_size: int,
        open_tier: Callable[[int], BlockTier],
        *,
        readers: WorkerThreads | None = None,
        writer: WorkerThreads | None = None,
        clock: Callable[[], float] = time.monotonic,
        copier_of: Callable[..., BlockCopier] | None = None,
    ) -> None:
        self._block_size = block_size
        self._open_tier = open_tier
        self.copier_of = copier_of
        self._opened: _Opened | None = None
        self._states: StateCache | None = None
        self._readers = readers or WorkerThreads("kv-tier-reader", NUM_READERS)
        self._writer = writer or WorkerThreads("kv-tier-writer", 1)
        self._clock = clock
        self._costs = LoadCosts(block_size)
        self._counters = Counters()
        # Scheduler side.
        self._prompts = PromptBlocks(block_size)
        self._lookups: dict[str, _Lookup] = {}
        self._keys: dict[str, SequenceKeys] = {}
        self._interrupted: set[str] = set()  # requests of whose blocks no more are stored, see `_to_store`
        # To be filled by loads that are about to begin, by request, and how many tokens are here already.
        self._checkpoints: dict[str, tuple[int, int]] = {}
        self._filled_next: set[int] = set()  # checkpoints that loads of the next step write to
        self._new_loads: list[BlockLoad] = []
        self._cancelled: list[str] = []
        self._refresh_due = 0.0
        # Worker side.
        self._loads: dict[str, LoadInProgress] = {}
        self._stores: list[FilledBlock] = []
        self._generation = 0  # that the stores belong to
        self._failed_block_ids: set[int] = set()  # to be reported

    # -- scheduler side ------------------------------------------------------------------------------------

    @override
    def request_arrived(self, request: Request) -> None:
        """Follow the prompt, too, of a request that is not asked about because it computes all of it."""
        if request.needs_whole_prompt and request.pooling_params is None:
            self._keys_of(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        keys = self._keys_of(request)
        lookup = self._lookups.setdefault(request.request_id, _Lookup())
        lookup.num_local = num_computed_tokens
        if (
            num_computed_tokens % self._block_size
            or not self._tier.is_readable
            or self._readers.max_run_time() > MAX_READ_TIME
        ):
            return 0, False
        first = num_computed_tokens // self._block_size
        # The last token is always computed, for its logits.
        end = min(len(keys), (request.num_tokens - 1) // self._block_size)
        if first < end and self._tier.is_searched and self._is_searching(lookup, keys, end):
            return None, False
        num_blocks = self._tier.residents.count_leading(map(keys.__getitem__, range(first, end)))
        found = range(first, first + self._num_before_state(keys, first, num_blocks))
        if not found or not self._prefers_loading(lookup, keys, found):
            return 0, False
        return len(found) * self._block_size, True

    def _num_before_state(self, keys: SequenceKeys, first: int, num_blocks: int) -> int:
        """Return how many of `num_blocks` blocks end with one that has a state behind it, if they must."""
        if self._states is None:
            return num_blocks
        while num_blocks and not self._has_state(keys[first + num_blocks - 1]):
            num_blocks -= 1
        return num_blocks

    def _has_state(self, key: BlockKey) -> bool:
        residents = self._tier.residents
        [piece] = piece_keys(key, 1)
        if residents.place_of(piece) is None:  # of most blocks
            return False
        return residents.count_leading(self._pieces_behind(key)) == self._num_pieces

    def _pieces_behind(self, key: BlockKey) -> list[BlockKey]:
        """Return the keys of the state behind a block; empty: there are no states."""
        return piece_keys(key, self._num_pieces)

    @property
    def _num_pieces(self) -> int:
        return 0 if self._states is None else self._states.num_pieces

    def _is_searching(self, lookup: _Lookup, keys: SequenceKeys, end: int) -> bool:
        """Return whether the tier is still looking for a prompt's blocks; begin that once for a request.

        Those that the cache has are looked for, too: without them, the others could not be reached.
        """
        if lookup.search is None:
            lookup.search = self._tier.search([keys[index] for index in range(end)], self._num_pieces)
            lookup.search_end = self._clock() + SEARCH_PATIENCE
        return not lookup.search.done() and self._clock() < lookup.search_end

    def _prefers_loading(self, lookup: _Lookup, keys: SequenceKeys, found: range) -> bool:
        """Return the cheaper choice: made once for a request, because it may be asked about in each step."""
        if lookup.prefers_loading is None:
            num_queued = sum(load.num_left for load in list(self._loads.values())) + self._num_pieces
            num_in_memory = self._tier.count_in_memory(map(keys.__getitem__, found))
            lookup.prefers_loading = self._costs.prefers_loading(len(found), num_queued, num_in_memory)
            self._counters.add(num_computations_chosen=not lookup.prefers_loading)
        return lookup.prefers_loading

    @override
    def load_state(self, request: Request, checkpoint: int, num_local_tokens: int) -> None:
        self._checkpoints[request.request_id] = checkpoint, num_local_tokens

    @override
    def update_state_after_alloc(
        self, request: Request, block_ids: IntArray, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        keys = self._keys_of(request)
        first = self._lookups[request.request_id].num_local // self._block_size
        end = first + num_external_tokens // self._block_size
        state: list[tuple[BlockKey, BlockIds | StatePiece]] = []
        if self._states is not None:
            checkpoint, num_local = self._checkpoints.pop(request.request_id)
            first = num_local // self._block_size
            self._filled_next.add(checkpoint)
            pieces = pieces_of(checkpoint, self._num_pieces, int(block_ids[0, end - 1]))
            state += zip(self._pieces_behind(keys[end - 1]), pieces, strict=True)
        found = zip(map(keys.__getitem__, range(first, end)), by_block(block_ids[:, first:end]), strict=True)
        blocks = [*found, *state]
        generation = self._tier.residents.generation
        num_in_memory = self._tier.count_in_memory(key for key, _ in blocks)
        self._new_loads.append(BlockLoad(request.request_id, blocks, generation, num_in_memory))
        self._counters.add(num_loads_chosen=1)

    @override
    def cancel_load(self, request_id: str) -> None:
        self._new_loads = [load for load in self._new_loads if load.request_id != request_id]
        self._cancelled.append(request_id)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TierMetadata:
        residents = self._tier.residents
        stores: list[FilledBlock] = []
        for save in self._prompts.completed_by(scheduler_output, self._keys):
            stores += self._to_store(save)
        for state in states_held(scheduler_output):
            stores += self._pieces_to_store(state)
        self._filled_next.clear()
        metadata = TierMetadata(
            residents.generation,
            scheduler_output.total_num_scheduled_tokens,
            self._cancelled,
            self._new_loads,
            stores if self._tier.is_writable else [],
        )
        self._new_loads, self._cancelled = [], []
        self._refresh_if_due()
        return metadata

    def _to_store(self, save: Save) -> Iterator[FilledBlock]:
        """Yield the blocks to be stored now, up to the first that some group does not have any more.

        Those behind it could not be reached: they are stored when the prompt has been computed once more.
        """
        if not save.first_block:
            self._interrupted.discard(save.request_id)
        by_key = dict(save.blocks)
        for key in self._tier.residents.use(by_key):
            if NULL_BLOCK in by_key[key][1:]:
                self._interrupted.add(save.request_id)
            if save.request_id in self._interrupted:
                return
            yield FilledBlock(save.request_id, key, by_key[key])

    def _pieces_to_store(self, state: HeldState) -> Iterator[FilledBlock]:
        """Yield the pieces to be stored now of a state behind blocks of a prompt."""
        keys, index = self._keys.get(state.request_id), state.num_tokens // self._block_size - 1
        is_kept = state.checkpoint not in self._filled_next
        if keys is None or not 0 <= index < len(keys) or not is_kept:
            return
        names = self._pieces_behind(keys[index])
        pieces = dict(zip(names, pieces_of(state.checkpoint, self._num_pieces, 0), strict=True))
        for key in self._tier.residents.use(names):
            yield FilledBlock(state.request_id, key, pieces[key])

    def _refresh_if_due(self) -> None:
        now = self._clock()
        if now >= self._refresh_due:
            self._refresh_due = now + REFRESH_INTERVAL
            self._writer.submit(self._tier.refresh)

    @override
    def request_finished(
        self, request: Request, block_ids: IntArray
    ) -> tuple[bool, Mapping[str, Any] | None]:
        self._interrupted.discard(request.request_id)
        self._lookups.pop(request.request_id, None)
        self._keys.pop(request.request_id, None)
        self._checkpoints.pop(request.request_id, None)
        self._prompts.forget(request.request_id)
        return False, None

    @override
    def leases_renewed(self) -> frozenset[str]:
        """Nothing is lent."""
        return frozenset()

    @override
    def reset(self) -> bool:
        """Loads under way fail, stores under way are dropped."""
        self._tier.clear()
        return True

    def _keys_of(self, request: Request) -> SequenceKeys:
        """Return the keys of a request's prompt, which are kept until it has finished."""
        keys = self._keys.get(request.request_id)
        if keys is None:
            keys = SequenceKeys(root_digest(salt=request.cache_salt), self._block_size)
            keys.extend(request.prompt_array)
            self._keys[request.request_id] = keys
        return keys

    # -- worker side ---------------------------------------------------------------------------------------

    @override
    def register_states(self, states: StateCache) -> None:
        self._states = states

    @override
    def register_kv_caches(self, kv_caches: Sequence[PagedAttentionCache | BlockStore]) -> None:
        """Open the tier."""
        states = () if self._states is None else (self._states,)
        copier = (self.copier_of or host_copier)(kv_caches, self._clock, *states)
        tier = self._open_tier(copier.bytes_per_block)
        self._opened = _Opened(
            tier,
            copier,
            BlockReader(tier, copier, self._readers, self._counters, self._clock),
            BlockWriter(tier, copier, self._writer, self._counters),
            StepTimes(copier.mark, self._costs),
        )

    @override
    def start_load_kv(self, metadata: object | None) -> None:
        self._stores = []
        if not isinstance(metadata, TierMetadata):
            return
        opened = self._require_opened()
        for request_id in metadata.cancelled:
            load = self._loads.pop(request_id, None)
            if load is not None:
                load.cancel()
        self._stores, self._generation = metadata.stores, metadata.generation
        began = opened.times.begin(metadata.num_tokens)
        for new in metadata.loads:
            self._loads[new.request_id] = opened.reader.begin(new, began)

    @override
    def wait_for_layer_load(self, layer: int) -> None:
        """No step waits for a load."""

    @override
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Blocks are copied whole by `wait_for_save`."""

    @override
    def wait_for_save(self, failed_ids: frozenset[str]) -> None:
        self._stores = [block for block in self._stores if block.request_id not in failed_ids]
        self.begin_save(frozenset)

    @override
    def begin_save(self, failed_ids: Callable[[], frozenset[str]]) -> None:
        """Begin to copy what is to be stored: steps to come overwrite it only after that."""
        opened = self._require_opened()
        opened.times.end()
        stores, self._stores = self._stores, []
        opened.writer.store(stores, self._generation, failed_ids)

    @override
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        received = [request_id for request_id, load in self._loads.items() if not load.num_left]
        for request_id in received:
            self._end(self._loads.pop(request_id))
        return frozenset(), frozenset(received)

    @override
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_block_ids = frozenset(self._failed_block_ids), set()
        return failed

    @override
    def stats(self) -> KVConnectorStats:
        tier = self._tier
        num_stored = len(tier.residents)
        return msgspec.structs.replace(
            self._counters.stats,
            capacity_bytes=tier.residents.num_places * tier.bytes_per_place,
            num_stored_blocks=num_stored,
            stored_bytes=num_stored * tier.bytes_per_place,
            num_evicted_blocks=tier.residents.num_evicted,
            num_memory_hits=tier.num_memory_hits,
            load_seconds_per_block=self._costs.seconds_per_block,
            compute_seconds_per_token=self._costs.seconds_per_token,
        )

    @override
    def close(self) -> None:
        """Write what waits for it, within `CLOSE_TIMEOUT` seconds; give up all loads."""
        for load in self._loads.values():
            load.cancel()
        self._loads.clear()
        self._readers.close(CLOSE_TIMEOUT)
        self._writer.close(CLOSE_TIMEOUT)
        if self._opened is not None:
            self._tier.close()

    @property
    def _tier(self) -> BlockTier:
        return self._require_opened().tier

    def _require_opened(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("register_kv_caches() must be called before KV is looked up, loaded or saved")
        return self._opened

    def _end(self, load: LoadInProgress) -> None:
        """Report what failed of a load; all of it if everything was forgotten meanwhile."""
        if load.load.generation != self._tier.residents.generation:
            self._failed_block_ids.update(block[0] for _, block in load.load.blocks)
            return
        self._failed_block_ids |= load.failed_block_ids
        num_slow = len(load.load.blocks) - load.load.num_in_memory
        if not load.failed_block_ids and num_slow > load.load.num_in_memory:
            self._costs.note_load(load.seconds, num_slow)

    # -- files ---------------------------------------------------------------------------------------------

    def save(
        self, path: Path, token_ids: list[int], cache_salt: str, identity: Identity
    ) -> Future[tuple[int, bool]]:
        """Save a prompt's KV in the writer's thread, behind all blocks that wait for it: `save_prompt`."""
        options = self._file_options(cache_salt)
        save = functools.partial(save_prompt, self._tier, path, token_ids, identity=identity, **options)
        return self._writer.call(save)

    def restore(self, path: Path, cache_salt: str, identity: Identity) -> Future[list[int]]:
        """Restore a prompt's KV in the writer's thread: `restore_prompt`."""
        options = self._file_options(cache_salt)
        restore = functools.partial(restore_prompt, self._tier, path, identity=identity, **options)
        return self._writer.call(restore)

    def _file_options(self, cache_salt: str) -> dict[str, Any]:
        return {
            "cache_salt": cache_salt,
            "block_size": self._block_size,
            "num_pieces": self._num_pieces,
        }
