"""A process that writes a tier is killed (-9) at random moments; `make soak-tiers` kills whole engines."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from tier_soak import damage

from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.tiers.disk.region import RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from subprocesses import started

pytestmark = pytest.mark.processes

PAYLOAD = 1 << 18
LAYOUT = RegionLayout(b"k" * 16, 16, PAYLOAD)
CAPACITY = 20 * LAYOUT.region_bytes
NUM_KILLS = 10
NUM_PREFIXES = 12


def prefix(number: int) -> list:
    keys = SequenceKeys(root_digest(), 16)
    keys.extend(np.arange(1000 * number, 1000 * number + 64, dtype=np.int32))
    return [keys[index] for index in range(4)]


def content_of(key) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(key.digest, "little")).integers(0, 256, PAYLOAD, np.uint8)


def open_tier(directory: str) -> DiskTier:
    return DiskTier(Path(directory), CAPACITY, LAYOUT, min_uses=1)


def write_for_ever(directory: str, seed: int) -> None:
    tier, rng = open_tier(directory), random.Random(seed)
    contents = {key: content_of(key) for number in range(NUM_PREFIXES) for key in prefix(number)}
    while True:
        keys = prefix(rng.randrange(NUM_PREFIXES))
        for key in tier.residents.use(keys):
            tier.write(key, contents[key], tier.residents.generation)
        print(".", end="", flush=True)


def test_whatever_a_kill_interrupts_what_is_read_is_right(tmp_path):
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_tier_kills as t; "
    num_right = 0
    for seed in range(NUM_KILLS):
        command = [sys.executable, "-c", f"{code}t.write_for_ever({str(tmp_path)!r}, {seed})"]
        with started(command, preload=True, stdout=-1) as writer:
            writer.stdout.read(1 + 7 * seed)  # prefixes that it has written
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        [file] = tmp_path.iterdir()
        assert file.stat().st_size <= CAPACITY
        if seed % 2:
            damage(file, random.Random(seed))
        tier = open_tier(str(tmp_path))
        assert tier.is_writable, "the lock went with the process"
        for key in (key for number in range(NUM_PREFIXES) for key in prefix(number)):
            into = np.empty(PAYLOAD, dtype=np.uint8)
            if tier.read(key, into):
                assert (into == content_of(key)).all()
                num_right += 1
        tier.close()
    assert num_right > 5 * NUM_KILLS
