"""The disk tier under faults: a block is read as it was written or not at all, whatever its file suffers."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.tiers.disk.region import RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from quire.kv.tiers.disk.tier_file import SUFFIX
from subprocesses import python_output
from unmutated import UNMUTATED

PAYLOAD = 6000
LAYOUT = RegionLayout(b"f" * 16, 4, PAYLOAD)
OTHER_LAYOUT = RegionLayout(b"g" * 16, 4, PAYLOAD)
NUM_PLACES = 5
CAPACITY = NUM_PLACES * LAYOUT.region_bytes + 100


def keys_of(first: int, count: int = 4) -> list:
    keys = SequenceKeys(root_digest(), 4)
    keys.extend(np.arange(100 * first, 100 * first + 4 * count, dtype=np.int32))
    return [keys[index] for index in range(count)]


KEYS = [key for first in range(4) for key in keys_of(first)]


def content_of(key) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(key.digest, "little")).integers(0, 256, PAYLOAD, np.uint8)


def open_tier(directory: Path, layout: RegionLayout = LAYOUT, capacity: int = CAPACITY) -> DiskTier:
    return DiskTier(directory, capacity, layout, min_uses=1)


def write(tier: DiskTier, key) -> bool:
    return tier.write(key, content_of(key), tier.residents.generation)


def read(tier: DiskTier, key) -> bool:
    """Return whether the block is there, after a look at what was read."""
    into = np.full(PAYLOAD, 7, dtype=np.uint8)
    is_there = tier.read(key, into)
    assert not is_there or (into == content_of(key)).all(), "wrong KV"
    return is_there


@pytest.fixture
def disk_full(monkeypatch):
    """While it holds an entry, writes stop in mid-region."""
    active: list[int] = []
    real = os.pwritev

    def pwritev(descriptor, buffers, offset):
        if not active:
            return real(descriptor, buffers, offset)
        real(descriptor, [memoryview(buffers[0])[:300]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", pwritev)
    return active


class DiskMachine(RuleBasedStateMachine):
    """Two tiers over one file, one of which writes, and everything that can happen to the file."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / f"{LAYOUT.fingerprint.hex()}{SUFFIX}"
        self.tiers = [self.open_tier(), self.open_tier()]
        self.is_disk_full = False
        self.real_pwritev = os.pwritev
        os.pwritev = self.pwritev

    def open_tier(self):
        return open_tier(self.directory)

    def is_in_place(self, tier) -> bool:
        return tier._file.is_in_place()

    def pwritev(self, descriptor, buffers, offset):
        if not self.is_disk_full:
            return self.real_pwritev(descriptor, buffers, offset)
        self.real_pwritev(descriptor, [memoryview(buffers[0])[:300]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    def teardown(self) -> None:
        os.pwritev = self.real_pwritev
        shutil.rmtree(self.directory)

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 1))
    def write(self, key, number) -> None:
        tier = self.tiers[number]
        is_written = write(tier, key)
        assert tier.is_writable or not is_written
        if is_written:
            assert read(tier, key)

    @rule(first=st.integers(0, 3), number=st.integers(0, 1))
    def write_prefix(self, first, number) -> None:
        for key in keys_of(first):
            write(self.tiers[number], key)

    @rule(number=st.integers(0, 1), number_of_key=st.integers(0, 30))
    def use(self, number, number_of_key) -> None:
        self.tiers[number].residents.use([KEYS[number_of_key % len(KEYS)]])

    @rule(number=st.integers(0, 1))
    def reopen(self, number) -> None:
        """As after a crash: nothing is closed or said good-bye to, the kernel drops the lock."""
        self.tiers[number] = None
        self.tiers[number] = self.open_tier()
        other = self.tiers[1 - number]
        if other.is_writable and self.is_in_place(other):
            assert not self.tiers[number].is_writable, "two writers"

    @rule(number=st.integers(0, 1))
    def refresh(self, number) -> None:
        self.tiers[number].refresh()

    @rule(number=st.integers(0, 1))
    def clear(self, number) -> None:
        self.tiers[number].clear()
        assert not any(read(self.tiers[number], key) for key in KEYS)

    @rule(is_full=st.booleans())
    def fill_disk(self, is_full) -> None:
        self.is_disk_full = is_full

    @rule(offset=st.integers(0, CAPACITY), bit=st.integers(0, 7))
    def flip_bit(self, offset, bit) -> None:
        if self.path.exists() and offset < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.seek(offset)
                [byte] = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 1 << bit]))

    @rule(size=st.integers(0, CAPACITY))
    def truncate(self, size) -> None:
        if self.path.exists() and size < self.path.stat().st_size:
            os.truncate(self.path, size)

    @rule(source=st.integers(0, 9), into=st.integers(0, 9), pages=st.integers(1, 2))
    def copy_pages(self, source, into, pages) -> None:
        """A torn write: some pages of a region are those of another."""
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.seek(source * 4096)
                content = file.read(pages * 4096)
                if into * 4096 + len(content) <= self.path.stat().st_size:
                    file.seek(into * 4096)
                    file.write(content)

    @rule()
    def vanish(self) -> None:
        self.path.unlink(missing_ok=True)

    @rule()
    def remove_the_directory(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    @rule(number=st.integers(0, 1))
    def read_all(self, number) -> None:
        for key in KEYS:
            read(self.tiers[number], key)

    @invariant()
    def is_bounded(self) -> None:
        assert sum(file.stat().st_size for file in self.directory.iterdir()) <= CAPACITY
        assert all(len(tier.residents) <= NUM_PLACES for tier in self.tiers)


DiskMachine.TestCase.settings = settings(backend=UNMUTATED, max_examples=36, stateful_step_count=40)
TestDiskTier = DiskMachine.TestCase


# -- without faults ----------------------------------------------------------------------------------------


def test_a_reopened_tier_has_what_was_written(tmp_path):
    tier = open_tier(tmp_path)
    keys = keys_of(0)
    assert all(write(tier, key) for key in keys)
    assert all(read(tier, key) for key in keys)
    tier.close()
    assert not any(read(tier, key) for key in keys)
    again = open_tier(tmp_path)
    assert all(read(again, key) for key in keys)
    assert again.residents.count_leading(keys) == 4


def test_the_oldest_prefix_is_overwritten_also_after_a_restart(tmp_path):
    tier = open_tier(tmp_path)
    for key in (*keys_of(0, 2), *keys_of(1, 2)):
        write(tier, key)
    tier.residents.use(keys_of(0, 2))
    tier.close()
    again = open_tier(tmp_path)
    for key in keys_of(2, 3):
        write(again, key)
    assert all(read(again, key) for key in keys_of(2, 3))
    assert again.residents.count_leading(keys_of(1, 2)) == 2
    assert again.residents.num_evicted == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_smaller_size_takes_effect_at_the_next_start(tmp_path):
    tier = open_tier(tmp_path)
    for key in keys_of(0):
        write(tier, key)
    tier.close()
    small = open_tier(tmp_path, capacity=2 * LAYOUT.region_bytes)
    assert [read(small, key) for key in keys_of(0)] == [True, True, False, False]
    assert next(tmp_path.iterdir()).stat().st_size == 2 * LAYOUT.region_bytes


@pytest.mark.parametrize(
    "layout", [OTHER_LAYOUT, RegionLayout(b"f" * 16, 8, PAYLOAD), RegionLayout(b"f" * 16, 4, PAYLOAD - 8)]
)
def test_what_another_model_or_shape_has_stored_is_not_found(tmp_path, layout):
    tier = open_tier(tmp_path)
    for key in keys_of(0):
        write(tier, key)
    tier.close()
    other = open_tier(tmp_path, layout)
    assert not len(other.residents)


def test_the_directory_is_bounded_over_all_models(tmp_path):
    first = open_tier(tmp_path)
    for key in keys_of(0):
        write(first, key)
    second = open_tier(tmp_path, OTHER_LAYOUT)
    [one], [another] = keys_of(1, 1), keys_of(2, 1)
    assert write(second, one)
    assert write(second, another)
    assert not read(second, one), "the first tier is in use, and leaves room for one region"
    assert read(second, another)
    first.close()
    assert [write(second, key) for key in keys_of(3, 3)] == [True] * 3
    assert [file.name[:2] for file in tmp_path.iterdir()] == ["67"], "what nobody uses is removed"


def test_what_cannot_be_removed_does_not_keep_others_from_it(tmp_path):
    (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path / "nowhere")
    unused = tmp_path / f"unused{SUFFIX}"
    with unused.open("wb") as file:
        file.truncate(CAPACITY)
    directory = tmp_path / f"directory{SUFFIX}"
    directory.mkdir()
    os.utime(directory, (0, 0))  # so that it is tried first
    tier = open_tier(tmp_path, capacity=CAPACITY + directory.stat().st_size)
    assert write(tier, keys_of(0, 1)[0])
    assert not unused.exists()


# -- several processes -------------------------------------------------------------------------------------


def test_one_writes_and_others_read(tmp_path):
    writer, reader = open_tier(tmp_path), open_tier(tmp_path)
    assert (writer.is_writable, reader.is_writable) == (True, False)
    keys = keys_of(0)
    write(writer, keys[0])
    assert not write(reader, keys[0])
    assert not read(reader, keys[0])
    reader.refresh()
    assert read(reader, keys[0])
    writer.close()
    reader.refresh()
    assert reader.is_writable
    assert write(reader, keys[1])


def test_a_region_that_was_rewritten_is_a_miss_for_readers(tmp_path):
    writer = open_tier(tmp_path)
    for key in keys_of(0):
        write(writer, key)
    reader = open_tier(tmp_path)
    for key in keys_of(1):
        write(writer, key)
    assert [read(reader, key) for key in keys_of(0)] == [True, False, False, False]


@pytest.mark.processes
def test_another_process_reads_what_this_one_wrote(tmp_path):
    tier = open_tier(tmp_path)
    for key in keys_of(0):
        write(tier, key)
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_disk_tier import keys_of, open_tier, read, write
tier = open_tier(Path({str(tmp_path)!r}))
print([read(tier, key) for key in keys_of(0)], tier.is_writable, write(tier, keys_of(1)[0]))
"""
    assert python_output(code) == "[True, True, True, True] False False\n"


def test_after_a_reset_no_process_finds_what_this_one_stores(tmp_path):
    tier, reader = open_tier(tmp_path), open_tier(tmp_path)
    keys = keys_of(0)
    write(tier, keys[0])
    before = tier.residents.generation
    tier.clear()
    assert not read(tier, keys[0])
    assert not tier.write(keys[1], content_of(keys[1]), before), "computed before the reset"
    assert write(tier, keys[0])
    assert read(tier, keys[0])
    reader.refresh()
    assert not read(reader, keys[0])
    tier.close()
    assert not len(open_tier(tmp_path).residents)


# -- faults ------------------------------------------------------------------------------------------------


def test_a_full_disk_stores_nothing_and_goes_on_with_the_space_there_is(tmp_path, disk_full):
    tier = open_tier(tmp_path)
    old, new = keys_of(0, 2), keys_of(1, 2)
    assert [write(tier, key) for key in old] == [True, True]
    disk_full.append(1)
    assert not write(tier, new[0])
    assert next(tmp_path.iterdir()).stat().st_size == 2 * LAYOUT.region_bytes
    disk_full.clear()
    assert write(tier, new[0])
    assert (len(tier.residents), tier.residents.num_evicted) == (2, 1), "it does not grow before a refresh"
    tier.refresh()
    assert write(tier, new[1])
    assert len(tier.residents) == 3
    assert read(tier, old[0])


def test_a_disk_that_fails_is_a_miss(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    [key] = keys_of(0, 1)
    write(tier, key)

    def preadv(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    assert not read(tier, key)
    monkeypatch.undo()
    assert tier.residents.place_of(key) is None
    assert write(tier, key)


def test_what_is_written_to_a_file_that_was_cut_off_is_found_after_a_restart(tmp_path):
    """The region at its end is shorter than others."""
    tier = open_tier(tmp_path)
    keys = keys_of(0)[:2]
    for key in keys:
        write(tier, key)
    [file] = tmp_path.iterdir()
    os.truncate(file, 0)
    assert not any(read(tier, key) for key in keys)
    for key in keys:
        write(tier, key)
    assert file.stat().st_size % LAYOUT.region_bytes
    reopened = open_tier(tmp_path)
    assert all(read(reopened, key) for key in keys)


def test_a_vanished_file_is_made_anew(tmp_path):
    tier = open_tier(tmp_path / "kv")
    [key] = keys_of(0, 1)
    write(tier, key)
    shutil.rmtree(tmp_path / "kv")
    tier.refresh()
    assert not read(tier, key)
    assert write(tier, key)
    tier.close()
    assert read(open_tier(tmp_path / "kv"), key)


def test_while_the_directory_cannot_be_made_nothing_is_found(tmp_path):
    tier = open_tier(tmp_path / "kv")
    [key] = keys_of(0, 1)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("in the way")
    tier.refresh()
    assert (tier.is_writable, write(tier, key), read(tier, key)) == (False, False, False)
    (tmp_path / "kv").unlink()
    tier.refresh()
    assert write(tier, key)


def test_a_file_of_anything_is_an_empty_tier(tmp_path):
    path = tmp_path / f"{LAYOUT.fingerprint.hex()}{SUFFIX}"
    path.write_bytes(np.random.default_rng(0).bytes(3 * LAYOUT.region_bytes + 17))
    tier = open_tier(tmp_path)
    assert not len(tier.residents)
    assert all(write(tier, key) for key in keys_of(0))
