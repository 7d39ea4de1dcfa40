"""KV connectors for random histories, a network with peers or a tier, and all that may befall them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from fake_runner import FACTOR, GARBAGE, StateStore, kv_of

from faulty_connector import FaultyConnector
from inline_threads import InlineThreads
from insides import check_no_buffer_leaks
from quire.kv.blocks.block_hash import BlockKey
from quire.kv.blocks.groups import NULL_BLOCK, first_in_window
from quire.kv.blocks.state_pieces import piece_keys
from quire.kv.tiers.block_copier import HostCopier
from quire.kv.tiers.cached_tier import CachedTier
from quire.kv.tiers.connector import MAX_READ_TIME, TierConnector
from quire.kv.tiers.disk.region import FINGERPRINT_BYTES, RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from quire.kv.tiers.tier import BlockTier, MemoryTier
from quire.request import Request

if TYPE_CHECKING:
    from mixed_world import Chooser


NUM_BUFFERS = 8  # for blocks that wait to be written; when all are in use, blocks are dropped


class Reluctant:
    """Says for some requests, as long as it is told to, that it does not know yet; raises when told to."""

    is_reluctant = False
    num_failures = 0  # of the next calls

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.put_off: set[str] = set()

    def _fail_if_told(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("no answer")

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self._fail_if_told()
        super().update_state_after_alloc(request, block_ids, num_external_tokens)

    def cancel_load(self, request_id):
        super().cancel_load(request_id)
        self._fail_if_told()

    def request_finished(self, request, block_ids):
        answer = super().request_finished(request, block_ids)
        self._fail_if_told()
        return answer

    def leases_renewed(self):
        self._fail_if_told()
        return super().leases_renewed()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._fail_if_told()
        if self.is_reluctant and len(request.prompt_token_ids) % 2:
            self.put_off.add(request.request_id)
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class MixedConnector(Reluctant, FaultyConnector):
    """Beside states it lends, and loads nothing."""

    FAULTS = ("fail", "silent", "answer", "dead peer", "living peer")
    moves_states = True

    def __init__(self, block_size: int, windows: list[int], **options) -> None:
        super().__init__(block_size, **options)
        self.windows = windows
        self.preempted: set[str] = set()
        self.states: StateStore | None = None
        self.offered: dict[str, int] = {}  # checkpoints, by request that is about to end
        self.lent: dict[str, tuple[int, list[int]]] = {}  # with what they hold
        self.num_lent = 0
        self.wrong: list[str] = []  # the scheduler catches what these calls raise

    def register_states(self, states: StateStore) -> None:
        self.states = states

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found if self.states is None or found[0] is None else (0, False)

    def lend_state(self, request, checkpoint):
        self.offered[request.request_id] = checkpoint

    def lease_ended(self, request_id):
        super().lease_ended(request_id)
        if request_id in self.lent:
            checkpoint, content = self.lent.pop(request_id)
            if self.states.checkpoints[checkpoint] != content:
                self.wrong.append(f"the state of {request_id} was overwritten while it was lent")

    def build_connector_meta(self, scheduler_output):
        self.preempted.update(scheduler_output.preempted_req_ids)
        return super().build_connector_meta(scheduler_output)

    def misbehave(self, what: str, choose: Chooser) -> None:
        match what:
            case "fail":
                self.fail_next_loads(1, num_good_blocks=choose.integer(0, 2))
            case "silent":
                self.never_answer_next_loads(1)
            case "answer":
                self.answer()
            case _:
                self.is_peer_alive = what == "living peer"

    def request_finished(self, request, block_ids):
        checkpoint = self.offered.pop(request.request_id, None)
        answer = super().request_finished(request, block_ids)
        if answer[0] and checkpoint is not None:
            content = list(self.states.checkpoints[checkpoint])
            last = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
            if GARBAGE not in content and content[0] != kv_of(request.prompt_array.tolist())[last - 1]:
                self.wrong.append(f"the state of {request.request_id} is another's")
            self.lent[request.request_id] = checkpoint, content
            self.num_lent += 1
        keeps_lent = request.request_id not in self.preempted and not request.sampling_params.beam_width
        if answer[0] and self.by_group and keeps_lent:
            self._check_lent(request, block_ids)
        self.preempted.discard(request.request_id)
        return answer

    def _check_lent(self, request: Request, block_ids: np.ndarray) -> None:
        """Check that all groups have what is seen by the last token of the prompt and those behind it."""
        num_tokens = request.num_prompt_tokens - 1
        for window, ids in zip(self.windows, block_ids[1:], strict=True):
            first = first_in_window(num_tokens, window, self._block_size)
            if (ids[first : -(-num_tokens // self._block_size)] == NULL_BLOCK).any():
                self.wrong.append(f"{request.request_id} has left blocks that it lends")

    def settle(self) -> Counter[str]:
        assert not self.offered
        assert not self.wrong, self.wrong
        num_lent, self.num_lent = self.num_lent, 0
        return Counter({"states lent": num_lent})


class FaultyTier(BlockTier):
    """A tier that raises when told to, and checks what it is given to store."""

    num_reads_to_fail = num_writes_to_fail = 0

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.wrong: list[BlockKey] = []  # that were to be stored and were not what computing gives
        self._last_kv: dict[bytes, int] = {}  # of a block's last token, by digest

    def read(self, key, into):
        if self.num_reads_to_fail:
            self.num_reads_to_fail -= 1
            raise OSError(errno.EIO, "Input/output error")
        return super().read(key, into)

    def write(self, key, content, generation):
        self._check(key, content)
        if self.num_writes_to_fail:
            self.num_writes_to_fail -= 1
            raise MemoryError
        return super().write(key, content, generation)

    def _check(self, key: BlockKey, content: np.ndarray) -> None:
        [piece] = piece_keys(key._replace(digest=key.parent), 1)
        if piece == key:  # of the state behind its block, or behind the piece before
            kv = set(content.view(np.uint64).tolist())
            if kv != {self._last_kv.setdefault(key.parent, min(kv)) % (1 << 64)}:
                self.wrong.append(key)
            self._last_kv[key.digest] = self._last_kv[key.parent]
            return
        tokens = np.frombuffer(key.tokens, dtype=np.int32).tolist()
        parts = content.view(np.uint64).reshape(-1, len(tokens))  # of the groups, which have the same KV here
        if (parts != parts[0]).any():
            self.wrong.append(key)
        kv = parts[0].tolist()
        before = self._last_kv.setdefault(key.parent, (kv[0] - tokens[0] - 1) * pow(FACTOR, -1, 1 << 64))
        for token, found in zip(tokens, kv, strict=True):
            before = (before * FACTOR + token + 1) % (1 << 64)
            if before != found:
                self.wrong.append(key)
        self._last_kv[key.digest] = before

    def spoil(self, choose: Chooser) -> None:
        """Nothing but its calls can fail."""


class FaultyMemoryTier(FaultyTier, MemoryTier):
    pass


class FaultyDiskTier(FaultyTier, DiskTier):
    """On a disk that now and then turns a bit of what it writes."""

    def __init__(self, directory: str, capacity_bytes: int, layout: RegionLayout, *, min_uses: int, choose):
        super().__init__(Path(directory), capacity_bytes, layout, min_uses=min_uses)
        self._choose = choose

    def write(self, key, content, generation):
        is_written = super().write(key, content, generation)
        if is_written and self._path.exists() and self._choose.chance(10):
            self._turn_bit(self.residents.place_of(key))
        return is_written

    def _turn_bit(self, place: int) -> None:
        """Turn a bit in the header or in the KV of a region."""
        layout = self._layout
        header = 0, layout.header_bytes - 1
        kv = layout.header_bytes, layout.header_bytes + layout.payload_bytes - 1
        offset = place * layout.region_bytes + self._choose.integer(*self._choose.among([header, kv]))
        with self._path.open("r+b") as file:
            for byte in os.pread(file.fileno(), 1, offset):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << self._choose.integer(0, 7)]), offset)

    def spoil(self, choose: Chooser) -> None:
        """Remove the file, cut it short, or let the disk be full."""
        if not self._path.exists():
            return
        match choose.among(["vanish", "cut", "full"]):
            case "vanish":
                self._path.unlink()
            case "cut":
                os.truncate(self._path, choose.integer(0, self._path.stat().st_size))
            case "full" if self._file is not None:
                self._file.write = _disk_is_full


def _disk_is_full(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class MixedTier(Reluctant, TierConnector):
    """A tier whose threads run a bit at each step, and not at all when told so."""

    FAULTS = ("fail", "fail to write", "spoil", "slow", "hang", "answer")

    def __init__(self, block_size: int, store: FaultyTier, choose: Chooser, *, kept_bytes: int = 0) -> None:
        self.store = store
        tier = CachedTier(store, kept_bytes) if kept_bytes else store
        self._threads = InlineThreads(is_held=True), InlineThreads(is_held=True)
        super().__init__(
            block_size,
            lambda _: tier,
            readers=self._threads[0],
            writer=self._threads[1],
            copier_of=lambda caches, clock, *pieces: HostCopier(
                caches, pieces=pieces[0] if pieces else None, num_buffers=NUM_BUFFERS, clock=clock
            ),
        )
        self._choose = choose
        self._num_pauses = 0  # of all threads
        self._told: Counter[str] = Counter()

    def misbehave(self, what: str, choose: Chooser) -> None:
        match what:
            case "fail":
                self.store.num_reads_to_fail = choose.integer(1, 3)
            case "fail to write":
                self.store.num_writes_to_fail = choose.integer(1, 3)
            case "spoil":
                self.store.spoil(choose)
            case "slow":
                self._num_pauses = choose.integer(1, 20)
            case "hang" | "answer":
                self._threads[0].seconds_stuck = 2 * MAX_READ_TIME if what == "hang" else 0.0

    def start_load_kv(self, metadata):
        super().start_load_kv(metadata)
        self._let_threads_run()

    def get_finished(self, finished_ids):
        self._let_threads_run()
        return super().get_finished(finished_ids)

    def _let_threads_run(self) -> None:
        if self._num_pauses:
            self._num_pauses -= 1
            return
        for threads in self._threads:
            if not threads.seconds_stuck:
                threads.run_held(self._choose.integer(0, 4))

    def settle(self) -> Counter[str]:
        """Let everything end, and check that nothing is held and nothing wrong was stored.

        Returns:
            What happened since the last call.
        """
        for threads in self._threads:
            threads.run_held()
        assert not self.store.wrong
        opened = self._require_opened()
        held = [self._keys, self._lookups, self._loads, self._new_loads, self._stores, self._checkpoints]
        assert not any(held), held
        assert not self._prompts._tables
        assert not opened.writer.num_waiting
        check_no_buffer_leaks(self, NUM_BUFFERS)
        stats = self.stats()
        counts = Counter(
            {
                "tiers: blocks written": stats.num_written_blocks,
                "tiers: blocks evicted": stats.num_evicted_blocks,
                "tiers: blocks loaded": stats.num_loaded_blocks,
                "tiers: failed reads": stats.num_failed_reads,
                "tiers: failed writes": stats.num_failed_writes,
                "tiers: dropped writes": stats.num_dropped_writes,
            }
        )
        new, self._told = counts - self._told, counts
        return new


def draw_connector(choose: Chooser, block_size: int, windows: list[int]) -> MixedConnector | MixedTier | None:
    """Return a connector for cache groups with these windows, if it is by group."""
    kind = choose.among(["none"] * 9 + ["network"] * 6 + ["memory tier"] * 4 + ["disk tier"])
    num_bytes, num_blocks = 8 * block_size * (1 + len(windows)), choose.among([5, 1000])
    if kind == "none":
        return None
    if kind == "network":
        return MixedConnector(
            block_size,
            windows,
            load_steps=choose.among([0, 1, 3]),
            send_steps=choose.among([None, 1, 4]),
            keeps_tails=choose.chance(50),
            by_group=choose.chance(60),
            capacity_bytes=num_bytes * num_blocks,
        )
    min_uses = choose.among([1, 1, 2])
    if kind == "memory tier":
        tier = FaultyMemoryTier(num_bytes * num_blocks, num_bytes, min_uses=min_uses)
        return MixedTier(block_size, tier, choose)
    directory = tempfile.TemporaryDirectory()
    layout = RegionLayout(b"f" * FINGERPRINT_BYTES, block_size, num_bytes)
    capacity_bytes = num_blocks * layout.region_bytes
    tier = FaultyDiskTier(directory.name, capacity_bytes, layout, min_uses=min_uses, choose=choose)
    tier.directory = directory  # removed with the tier
    return MixedTier(block_size, tier, choose, kept_bytes=choose.among([0, 3 * num_bytes]))
