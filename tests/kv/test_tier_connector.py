"""The connector to a tier: the contract for each tier, what it stores, what it chooses, and its faults."""

from __future__ import annotations

import errno
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from connector_contract import BLOCK, PROMPT, ConnectorContract, Engine, kv_of, request_of

from held import num_held
from inline_threads import InlineThreads
from insides import check_no_buffer_leaks, memory_of, opened, places_in_memory, tier_of, writer_of
from quire.kv.tiers import block_copier
from quire.kv.tiers.cached_tier import CachedTier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.disk.region import RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from quire.kv.tiers.tier import MemoryTier
from quire.kv.tiers.worker_threads import WorkerThreads
from thread_shortage import no_threads_to_spare

BLOCKS = [20, 21, 22, 23]


class FaultyTier(MemoryTier):
    """A memory tier whose calls raise when a test says so."""

    def __init__(self, num_blocks: int, bytes_per_block: int, *, min_uses: int = 1) -> None:
        super().__init__(num_blocks * bytes_per_block, bytes_per_block, min_uses=min_uses)
        self.failing: set[str] = set()
        self.num_reads_to_fail = 0

    def read(self, key, into):
        if "read" in self.failing or self.num_reads_to_fail:
            self.num_reads_to_fail = max(0, self.num_reads_to_fail - 1)
            raise OSError(errno.EIO, "Input/output error")
        return super().read(key, into)

    def write(self, key, content, generation):
        if "write" in self.failing:
            raise MemoryError
        return super().write(key, content, generation)

    def refresh(self):
        if "refresh" in self.failing:
            raise OSError(errno.EIO, "Input/output error")


class Bench:
    """A connector whose threads run when they are told to, and its engine."""

    def __init__(self, *, num_blocks: int = 32, min_uses: int = 1, **options) -> None:
        self.readers, self.writer = InlineThreads(), InlineThreads()
        self.tier = FaultyTier(num_blocks, BLOCK * 8, min_uses=min_uses)
        self.connector = TierConnector(
            BLOCK, lambda _: self.tier, readers=self.readers, writer=self.writer, **options
        )
        self.engine = Engine(self.connector)

    def store(self, tokens=PROMPT, name="first") -> None:
        request = request_of(name, tokens)
        blocks = list(range(len(tokens) // BLOCK + 1))
        self.engine.compute(request, blocks)
        self.engine.finish(request, blocks)

    def find(self, tokens=PROMPT, name="again", local=0) -> int:
        request = request_of(name, tokens)
        count, _ = self.connector.get_num_new_matched_tokens(request, local)
        self.engine.finish(request)
        return count

    def stats(self):
        return self.connector.stats()


class TestMemory(ConnectorContract):
    def make(self):
        return Bench().connector

    def fail_next_load(self, connector):
        tier_of(connector).num_reads_to_fail = 1


class TestDisk(ConnectorContract):
    @pytest.fixture(autouse=True)
    def directory(self):
        with tempfile.TemporaryDirectory() as name:
            self.path = Path(name)
            yield

    def open_tier(self, num_bytes):
        return DiskTier(self.path, 1 << 20, RegionLayout(b"f" * 16, BLOCK, num_bytes), min_uses=1)

    def make(self):
        return TierConnector(BLOCK, self.open_tier, readers=InlineThreads(), writer=InlineThreads())

    def fail_next_load(self, connector):
        [file] = self.path.iterdir()
        with file.open("r+b") as opened:
            opened.seek(520)
            byte = opened.read(1)[0]
            opened.seek(520)
            opened.write(bytes([byte ^ 1]))


class TestDiskBehindMemory(TestDisk):
    def open_tier(self, num_bytes):
        return CachedTier(super().open_tier(num_bytes), 1 << 20)

    def fail_next_load(self, connector):
        super().fail_next_load(connector)
        tier = tier_of(connector)
        while places_in_memory(tier):
            memory_of(tier).release(places_in_memory(tier).popitem()[1])


# -- what is stored ----------------------------------------------------------------------------------------


def test_a_prefix_is_stored_once_it_was_used_often_enough():
    bench = Bench(min_uses=3)
    found = []
    for number in range(4):
        bench.store(name=f"request-{number}")
        found.append(bench.find())
    assert found == [0, 0, 12, 12]
    assert bench.stats().num_written_blocks == 3


def test_chunks_of_one_request_are_one_use():
    bench = Bench(min_uses=2)
    request = request_of("first", PROMPT)
    bench.engine.compute(request, [3, 1, 4, 9], chunk=3)
    assert bench.find() == 0


def test_what_the_cache_had_already_is_stored_too():
    """The second request with a prefix finds it in the cache; the tier stores it nonetheless."""
    bench = Bench(min_uses=2)
    request = request_of("first", PROMPT)
    bench.engine.compute(request, [3, 1, 4, 9])
    second = request_of("second", PROMPT)
    bench.connector.get_num_new_matched_tokens(second, 12)
    bench.engine.step(second, [3, 1, 4, 5], computed=12, tokens=2)
    assert bench.engine.load(request_of("again", PROMPT), BLOCKS) == 12
    assert bench.engine.loaded(BLOCKS, 12).tolist() == kv_of(PROMPT)[:12].tolist()


def test_a_tier_that_cannot_be_written_to_is_read():
    bench = Bench()
    bench.store()
    type(bench.tier).is_writable, original = property(lambda _: False), type(bench.tier).is_writable
    try:
        bench.store(list(range(50, 64)), "second")
        assert bench.find() == 12
        assert bench.find(list(range(50, 64))) == 0
        assert bench.stats().num_dropped_writes == 0
    finally:
        type(bench.tier).is_writable = original


def test_while_the_writer_is_behind_stores_are_dropped_and_tried_again(monkeypatch):
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 2 * BLOCK * 8)
    bench = Bench()
    bench.writer.is_held = True
    bench.store()
    assert (bench.stats().num_dropped_writes, len(bench.writer.held)) == (1, 3)  # a refresh, two writes
    bench.writer.is_held = False
    bench.writer.run_held()
    assert bench.find() == 8
    bench.store(name="second")
    assert bench.find() == 12


def test_a_block_is_copied_before_it_is_overwritten():
    bench = Bench()
    bench.writer.is_held = True
    bench.store()
    bench.engine.cache.blocks[:] = 0.5
    bench.writer.is_held = False
    bench.writer.run_held()
    assert bench.engine.load(request_of("again", PROMPT), BLOCKS) == 12
    assert bench.engine.loaded(BLOCKS, 12).tolist() == kv_of(PROMPT)[:12].tolist()


# -- what is loaded ----------------------------------------------------------------------------------------


def test_a_load_ends_when_its_last_block_is_read():
    bench = Bench()
    bench.store()
    bench.readers.is_held = True
    request = request_of("again", PROMPT)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (12, True)
    bench.engine.begin_load(request, BLOCKS, 12)
    for _ in range(3):
        assert bench.engine.step()[1] == frozenset()
        bench.readers.run_held(1)
    assert bench.engine.step()[1] == {"again"}
    assert bench.engine.loaded(BLOCKS, 12).tolist() == kv_of(PROMPT)[:12].tolist()


def test_only_the_block_that_failed_is_named():
    bench = Bench()
    bench.store()
    bench.tier.num_reads_to_fail = 1
    bench.engine.load(request_of("again", PROMPT), BLOCKS)
    assert bench.engine.failed == {20}
    assert bench.stats().num_failed_reads == 1


def test_a_load_that_is_cancelled_between_two_blocks_fills_no_more():
    bench = Bench()
    bench.store()
    bench.readers.is_held = True
    request = request_of("again", PROMPT)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.engine.begin_load(request, BLOCKS, 12)
    bench.engine.step()
    bench.readers.run_held(1)
    bench.connector.cancel_load("again")
    bench.engine.step()
    bench.engine.cache.blocks[BLOCKS] = 7.0
    bench.readers.run_held()
    assert bench.engine.step()[1] == frozenset()
    assert (bench.engine.cache.blocks[BLOCKS] == 7.0).all()
    assert bench.stats().num_failed_reads == 0


def test_a_load_that_is_cancelled_while_a_block_is_read_fills_no_more():
    bench = Bench()
    bench.store()
    bench.readers.is_held = True
    request = request_of("again", PROMPT)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.engine.begin_load(request, BLOCKS, 12)
    bench.engine.step()
    read = bench.tier.read

    def read_and_cancel(key, into):
        is_read = read(key, into)
        bench.connector.cancel_load("again")
        bench.engine.step()
        bench.engine.cache.blocks[BLOCKS] = 7.0
        return is_read

    bench.tier.read = read_and_cancel
    bench.readers.run_held(1)
    assert (bench.engine.cache.blocks[BLOCKS] == 7.0).all()


def test_a_reset_while_blocks_are_read_voids_the_load():
    bench = Bench()
    bench.store()
    bench.readers.is_held = True
    request = request_of("again", PROMPT)
    bench.connector.get_num_new_matched_tokens(request, 0)
    bench.engine.begin_load(request, BLOCKS, 12)
    bench.engine.step()
    bench.readers.run_held(2)
    assert bench.connector.reset()
    bench.readers.run_held()
    assert bench.engine.step()[1] == {"again"}
    assert bench.engine.failed == {20, 21, 22}


def test_a_reset_while_blocks_wait_to_be_written_drops_them():
    bench = Bench()
    bench.writer.is_held = True
    bench.store()
    bench.connector.reset()
    bench.writer.run_held()
    assert bench.find() == 0


# -- what is cheaper ---------------------------------------------------------------------------------------


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Paced(Bench):
    """A bench where computing a token and reading a block take given seconds."""

    def __init__(self, *, per_token: float, per_block: float) -> None:
        self.clock = Clock()
        super().__init__(clock=self.clock)
        self.per_block = per_block
        read, save = self.tier.read, self.connector.wait_for_save

        def slow_read(key, into):
            self.clock.advance(self.per_block)
            return read(key, into)

        def slow_save(failed_ids):
            _, num_tokens = opened(self.connector).times._begun
            self.clock.advance(per_token * num_tokens)
            save(failed_ids)

        self.tier.read, self.connector.wait_for_save = slow_read, slow_save


@pytest.mark.parametrize(("per_block", "is_loaded"), [(0.3, True), (0.5, False)])
def test_the_cheaper_way_is_taken_and_counted(per_block, is_loaded):
    prompt = list(range(1, 24))  # long enough a step to be measured
    bench = Paced(per_token=0.1, per_block=per_block)
    bench.store(prompt)
    bench.engine.load(request_of("measured", prompt), [*BLOCKS, 24, 25])
    stats = bench.stats()
    assert (stats.num_loads_chosen, stats.num_computations_chosen) == (1, 0)
    assert stats.load_seconds_per_block == pytest.approx(per_block)
    assert stats.compute_seconds_per_token == pytest.approx(0.1)
    request = request_of("again", prompt)
    answers = {bench.connector.get_num_new_matched_tokens(request, 0) for _ in range(100)}
    assert answers == ({(20, True)} if is_loaded else {(0, False)})
    assert bench.stats().num_computations_chosen == (not is_loaded)


@pytest.mark.parametrize(("num_in_memory", "is_loaded"), [(1, False), (2, True), (5, True)])
def test_blocks_in_memory_are_no_reason_to_compute_them_and_no_measure_of_the_disk(num_in_memory, is_loaded):
    """Reading a block takes as long as computing 6 tokens; there are 5 blocks of 4."""
    prompt = list(range(1, 24))
    bench = Paced(per_token=0.1, per_block=0.6)
    bench.store(prompt)
    bench.engine.load(request_of("measured", prompt), [*BLOCKS, 24, 25])
    bench.tier.count_in_memory = lambda keys: min(num_in_memory, len(list(keys)))
    assert bench.find(prompt, "again") == (20 if is_loaded else 0)
    bench.per_block = 0.0  # all of them come from memory
    bench.tier.count_in_memory = lambda keys: len(list(keys))
    bench.engine.load(request_of("hot", prompt), [*BLOCKS, 24, 25])
    assert bench.stats().load_seconds_per_block == pytest.approx(0.6)


def test_a_load_behind_another_is_not_worth_its_wait():
    prompt = list(range(1, 24))
    bench = Paced(per_token=0.1, per_block=0.3)
    bench.store(prompt)
    bench.engine.load(request_of("measured", prompt), [*BLOCKS, 24, 25])
    bench.readers.is_held = True
    request = request_of("ahead", prompt)
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (20, True)
    bench.engine.begin_load(request, [*BLOCKS, 24, 25], 20)
    bench.engine.step()
    assert bench.find(prompt, "behind") == 0
    bench.readers.run_held(3)
    assert bench.find(prompt, "behind") == 0
    bench.readers.run_held(1)
    assert bench.find(prompt, "behind") == 20


def test_a_tier_that_became_fast_again_is_found_out():
    prompt = list(range(1, 24))
    bench = Paced(per_token=0.1, per_block=5.0)
    bench.store(prompt)
    bench.engine.load(request_of("slow", prompt), [*BLOCKS, 24, 25])
    bench.per_block = 0.001
    num_loaded = 0
    for number in range(5000):
        request = request_of(f"request-{number}", prompt)
        if bench.connector.get_num_new_matched_tokens(request, 0)[0]:
            bench.engine.load(request, [*BLOCKS, 24, 25])
            num_loaded += 1
        bench.engine.finish(request)
    assert num_loaded > 500


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["read", "write", "refresh"])
def test_a_tier_that_raises_ends_the_transfer_and_holds_nothing(call):
    bench = Bench(num_blocks=200)
    bench.store()
    bench.tier.failing = {call}
    held = num_held(bench.connector)
    for number in range(40):
        prompt = list(range(100 * number + 100, 100 * number + 114))
        bench.store(prompt, f"stored-{number}")
        request = request_of(f"loaded-{number}", PROMPT)
        bench.engine.load(request, BLOCKS)
        bench.engine.finish(request)
    check_no_buffer_leaks(bench.connector, block_copier.num_staged_blocks(BLOCK * 8))
    assert not opened(bench.connector).writer.num_waiting
    if call == "read":
        assert (bench.engine.failed, bench.stats().num_failed_reads) == ({20, 21, 22}, 120)
    if call == "write":
        assert bench.stats().num_failed_writes == 120
        assert num_held(bench.connector) < held + 1000, "only ghosts"
    bench.tier.failing = set()
    assert bench.find() == 12


def test_blocks_that_cannot_be_copied_are_not_stored_and_hold_nothing(caplog):
    bench = Bench()
    read_block = bench.engine.cache.read_block

    def refuse(block_id, into):
        if block_id == 2:  # the last of three
            raise OSError(errno.EIO, "Input/output error")
        read_block(block_id, into)

    bench.engine.cache.read_block = refuse
    bench.store()
    assert (bench.find(), bench.stats().num_failed_writes) == (0, 3)
    check_no_buffer_leaks(bench.connector, block_copier.num_staged_blocks(BLOCK * 8))
    assert "3 KV blocks could not be copied" in caplog.text
    bench.engine.cache.read_block = read_block
    bench.store(name="second")
    assert bench.find() == 12


def test_while_the_disk_hangs_nothing_is_loaded():
    bench = Bench()
    bench.store()
    bench.readers.seconds_stuck = 6.0
    assert bench.find() == 0
    bench.readers.seconds_stuck = 4.0
    assert bench.find() == 12


def test_nothing_is_kept_of_requests_that_have_ended():
    bench = Bench()
    bench.store()
    held = num_held(bench.connector)
    for number in range(50):
        request = request_of(f"request-{number}", PROMPT)
        bench.engine.load(request, BLOCKS)
        bench.engine.step(request, BLOCKS, computed=12, tokens=1)
        bench.engine.finish(request, BLOCKS)
    assert num_held(bench.connector) <= held + 40


def test_no_kv_moves_before_there_is_a_cache():
    connector = TierConnector(BLOCK, lambda _: FaultyTier(1, 8))
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        connector.get_num_new_matched_tokens(request_of("a", PROMPT), 0)
    connector.close()


# -- threads -----------------------------------------------------------------------------------------------


def test_threads_run_what_they_are_given_and_survive_what_it_raises(caplog):
    threads = WorkerThreads("test", 2)
    done = []
    threads.submit(lambda: done.append(1))
    threads.submit(lambda: 1 // 0)
    for _ in range(20):
        threads.submit(lambda: done.append(1))
    threads.close(60)
    assert len(done) == 21
    assert "ZeroDivisionError" in caplog.text


def test_tasks_wait_until_the_system_has_threads_to_spare():
    threads = WorkerThreads("test", 2)
    with no_threads_to_spare():
        first = threads.call(lambda: 1)
        threads.close(0.0)
    assert threads.call(lambda: 2).result(60) == 2
    assert first.result(60) == 1
    threads.close(60)


def test_a_task_that_hangs_does_not_keep_close():
    threads = WorkerThreads("test", 1)
    go_on, has_begun = threading.Event(), threading.Event()
    threads.submit(lambda: (has_begun.set(), go_on.wait()))
    assert has_begun.wait(60)
    assert threads.max_run_time() > 0
    threads.close(0.0)
    go_on.set()
    threads.close(60)
    assert threads.max_run_time() == 0


def test_with_threads_all_that_was_stored_is_loaded_again():
    tier = MemoryTier(1 << 20, BLOCK * 8, min_uses=1)
    connector = TierConnector(BLOCK, lambda _: tier)
    engine = Engine(connector)
    for number in range(10):
        prompt = [number + 1, *PROMPT]
        engine.compute(request_of(f"first-{number}", prompt), [3, 1, 4, 9])
    writer_of(connector).close(60)
    for number in range(10):
        prompt = [number + 1, *PROMPT]
        request = request_of(f"again-{number}", prompt)
        assert connector.get_num_new_matched_tokens(request, 0) == (12, True)
        engine.begin_load(request, BLOCKS, 12)
        received: frozenset[str] = frozenset()
        while not received:
            received = engine.step()[1]
        assert engine.loaded(BLOCKS, 12).tolist() == kv_of(prompt)[:12].tolist()
    assert np.isclose(connector.stats().num_loaded_blocks, 30)
    connector.close()
