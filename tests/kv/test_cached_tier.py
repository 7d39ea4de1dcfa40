"""Memory in front of the disk: the same blocks, sooner; never one that the tier was told to forget."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis.stateful import invariant
from test_disk_tier import CAPACITY, KEYS, LAYOUT, PAYLOAD, DiskMachine, content_of, keys_of, read, write
from test_disk_tier import open_tier as open_disk_tier

from insides import free_places, memory_of, places_in_memory, tier_of
from quire.kv.tiers import cached_tier
from quire.kv.tiers.cached_tier import CachedTier
from quire.kv.tiers.disk.tier import DiskTier
from unmutated import UNMUTATED

NUM_KEPT = 3


def open_tier(directory: Path) -> CachedTier:
    return CachedTier(open_disk_tier(directory), NUM_KEPT * PAYLOAD + 100)


class CachedMachine(DiskMachine):
    """What can happen to the file, behind memory."""

    def open_tier(self):
        return open_tier(self.directory)

    def is_in_place(self, tier) -> bool:
        return super().is_in_place(tier_of(tier))

    @invariant()
    def memory_is_bounded(self) -> None:
        for tier in self.tiers:
            places = sorted([*places_in_memory(tier).values(), *free_places(tier)])
            assert places == list(range(memory_of(tier)._num_opened))
            assert len(places) <= NUM_KEPT


CachedMachine.TestCase.settings = settings(backend=UNMUTATED, max_examples=24, stateful_step_count=40)
TestCachedTier = CachedMachine.TestCase


def damage(directory: Path) -> None:
    [file] = directory.iterdir()
    file.write_bytes(bytes(CAPACITY))


def test_blocks_that_were_written_or_read_last_are_not_read_from_the_disk(tmp_path):
    tier = open_tier(tmp_path)
    first, second, third, fourth = keys_of(0)
    for key in (first, second, third, fourth):
        write(tier, key)
    assert read(tier, second)
    assert read(tier, first)  # in place of the third
    assert tier.num_memory_hits == 1
    damage(tmp_path)
    assert [read(tier, key) for key in (first, second, fourth)] == [True] * 3
    assert tier.num_memory_hits == 4
    assert not read(tier, third)


def test_an_engine_that_only_reads_keeps_what_it_has_read(tmp_path):
    writer = open_tier(tmp_path)
    [key] = keys_of(0, 1)
    write(writer, key)
    reader = open_tier(tmp_path)
    assert not reader.is_writable
    assert not write(reader, keys_of(0)[1])
    assert [read(reader, key), read(reader, key), reader.num_memory_hits] == [True, True, 1]


def test_a_block_that_could_not_be_written_is_not_kept(tmp_path):
    tier = open_tier(tmp_path)
    [key] = keys_of(0, 1)
    assert not tier.write(key, content_of(key), tier.residents.generation - 1)
    assert not read(tier, key)


class ForgetsAmidAReading(DiskTier):
    """Is told to forget everything when it has read a block."""

    forget = None

    def read(self, key, into) -> bool:
        is_there = super().read(key, into)
        if self.forget is not None:
            self.forget()
        return is_there


def test_nothing_is_kept_that_was_read_before_a_reset(tmp_path):
    """The weights may be others by then, and so is the KV of the same tokens."""
    disk = ForgetsAmidAReading(tmp_path, CAPACITY, LAYOUT, min_uses=1)
    tier = CachedTier(disk, NUM_KEPT * PAYLOAD)
    keys = keys_of(0)
    for key in keys:
        write(tier, key)
    disk.forget = tier.clear
    assert tier.read(keys[0], np.empty(PAYLOAD, dtype=np.uint8))
    assert not any(read(tier, key) for key in KEYS)
    assert not places_in_memory(tier)


def test_a_block_that_is_read_keeps_its_place_until_then(tmp_path, monkeypatch):
    """Others evict it meanwhile, and write their own."""
    tier = open_tier(tmp_path)
    keys = keys_of(0)
    write(tier, keys[0])
    copy = np.copyto

    def evict_first(into, content):
        monkeypatch.undo()
        for key in keys[1:]:
            write(tier, key)
        assert keys[0] not in places_in_memory(tier)
        copy(into, content)

    monkeypatch.setattr(np, "copyto", evict_first)
    assert read(tier, keys[0])
    assert len(free_places(tier)) + len(places_in_memory(tier)) == NUM_KEPT


def test_nothing_is_read_that_was_there_before_a_reset_is_over(tmp_path, monkeypatch):
    """Another thread reads as soon as the disk has forgotten everything."""
    tier = open_tier(tmp_path)
    write(tier, KEYS[0])
    clear = DiskTier.clear
    found = []

    def clear_and_read(disk):
        clear(disk)
        found.append(read(tier, KEYS[0]))

    monkeypatch.setattr(DiskTier, "clear", clear_and_read)
    tier.clear()
    assert found == [False]


def test_what_is_damaged_on_the_disk_is_noticed_although_it_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_tier, "CHECKED_BLOCKS", 2)
    tier = open_tier(tmp_path)
    keys = keys_of(0)[:3]
    for key in keys:
        write(tier, key)
    [file] = tmp_path.iterdir()
    with file.open("r+b") as opened:
        opened.write(bytes(CAPACITY))
    assert tier.residents.count_leading(keys) == 3
    for _ in range(2):
        tier.refresh()
    assert tier.residents.count_leading(keys) == 0
    assert all(tier.write(key, content_of(key), tier.residents.generation) for key in keys)
    assert all(read(open_disk_tier(tmp_path), key) for key in keys)


def test_there_is_no_more_memory_than_the_disk_has_blocks(tmp_path):
    tier = CachedTier(open_disk_tier(tmp_path), 1 << 60)
    assert memory_of(tier).blocks.shape == (tier.residents.num_places, PAYLOAD)


def test_what_is_in_memory_is_counted(tmp_path):
    tier = open_tier(tmp_path)
    first, second, third, fourth = keys_of(0)
    for key in (first, second, third, fourth):
        write(tier, key)
    assert tier.count_in_memory([first, second, fourth]) == 2
    assert open_disk_tier(tmp_path).count_in_memory([first]) == 0


def test_nothing_is_left_in_memory_at_the_end():
    with tempfile.TemporaryDirectory() as directory:
        tier = open_tier(Path(directory))
        write(tier, KEYS[0])
        tier.close()
        assert not read(tier, KEYS[0])
