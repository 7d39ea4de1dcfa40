"""Pulls beside what breaks them: silence, cut connections, dead peers, releases."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from pair_checks import (
    assert_pullable,
    assert_slot,
    bound,
    bound_only,
    free_on_prompt,
)
from pairs import in_two_processes, in_two_processes_over_tcp, over_tcp
from sides import POOL, byte_desc, pattern, read_cache, write_new_cache

from quire.datadist import (
    CacheDesc,
    CacheKey,
    LLMException,
    LLMStatusCode,
)

SUCCESS = LLMStatusCode.LLM_SUCCESS
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT

SHORT = 300  # milliseconds: a time limit that a test waits for
SLACK = 50.0  # seconds that a busy machine may need beyond a time limit


@row("E52")
@pytest.mark.parametrize("num_bytes", [0, 1, 1000])
@over_tcp
def test_a_prompt_that_falls_silent_in_a_pull(make_pair, num_bytes):
    pair = make_pair(timeout=SHORT, forwarded=True)
    desc, key = byte_desc(1, 4096), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.hold_after(num_bytes)
    start = time.monotonic()
    with fails_with(TIMEOUT):
        pair.dm.pull_cache(key, target)
    assert time.monotonic() - start < SHORT / 1000 + SLACK
    with fails_with(NOT_YET):
        pair.dm.pull_cache(key, target)
    assert pair.decoder.link_clusters([pair.peer], sides.PATIENT)[1] == [LLMStatusCode.LLM_ALREADY_LINK]
    assert pair.unlink(timeout=SHORT) in {SUCCESS, LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED}
    pair.forwarder.release()
    pair.link()
    sides.set_timeout(pair.dm, sides.PATIENT)
    assert_pullable(pair, key, desc, 0, seed=1)


@row("E52")
@in_two_processes
def test_a_prompt_that_is_stopped(make_pair):
    pair = make_pair(timeout=SHORT)
    desc, key = byte_desc(1, 4096), CacheKey(1, 5)
    bound(pair, desc, [key], seed=1)
    target = pair.dm.allocate_cache(desc)
    os.kill(pair.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pair.process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        with fails_with(TIMEOUT):
            pair.dm.pull_cache(key, target)
        with fails_with(NOT_YET):
            pair.dm.pull_cache(key, target)
        assert pair.unlink(timeout=SHORT) != LLMStatusCode.LLM_NOT_YET_LINK
    finally:
        os.kill(pair.process.pid, signal.SIGCONT)
    pair.link()
    sides.set_timeout(pair.dm, sides.PATIENT)
    assert_pullable(pair, key, desc, 0, seed=1)


@pytest.mark.histories
@pytest.mark.first_case
@row("E52")
@over_tcp
def test_a_pull_waits_for_another(make_pair):
    pair = make_pair(pool=1 << 24, forwarded=True)
    large, small = byte_desc(1, 1 << 20), byte_desc(1)
    bound(pair, large, [CacheKey(1, 5)], seed=5)
    bound(pair, small, [CacheKey(1, 6)], seed=6)
    targets = [pair.dm.allocate_cache(desc) for desc in (large, small)]
    pair.forwarder.hold_after(1 << 16)
    first = threading.Thread(target=pair.dm.pull_cache, args=(CacheKey(1, 5), targets[0]))
    second = threading.Thread(target=pair.dm.pull_cache, args=(CacheKey(1, 6), targets[1]))
    first.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    second.start()
    pair.forwarder.release()
    first.join()
    second.join()
    assert_slot(pair, targets[0], 0, pattern(large, 5)[:, 0])
    assert_slot(pair, targets[1], 0, pattern(small, 6)[:, 0])


@pytest.mark.histories
@pytest.mark.first_case
@row("E56")
@over_tcp
def test_what_is_released_during_its_transfer(make_pair):
    pool = 1 << 24
    pair = make_pair(pool=pool, forwarded=True)
    desc, key = byte_desc(1, 1 << 21), CacheKey(1, 5)
    cache = bound(pair, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.hold_after(1 << 16)
    pulling = threading.Thread(target=pair.dm.pull_cache, args=(key, target))
    pulling.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    pair.pm.deallocate_cache(cache)
    pair.pm.remove_cache_key(key)
    assert free_on_prompt(pair, pool) < pool  # the transfer holds it
    other = bound(pair, desc, [], seed=6)
    pair.forwarder.release()
    pulling.join()
    assert_slot(pair, target, 0, pattern(desc, 5)[:, 0])
    np.testing.assert_array_equal(pair.call(read_cache, pair.pm, other), pattern(desc, 6))
    assert free_on_prompt(pair, pool) == pool - desc.num_tensors * desc.tensor_bytes


@pytest.mark.histories
@pytest.mark.first_case
@row("E77")
def test_a_key_is_free_as_soon_as_its_pull_has_returned(make_pair):
    pair = make_pair(forwarded=True)
    desc, key = byte_desc(1, 128), CacheKey(1, 5)
    for seed in range(20):
        bound_only(pair, desc, [key], seed=seed)
        assert_pullable(pair, key, desc, 0, seed=seed)
    assert free_on_prompt(pair) == POOL


def cut_pull(pair, desc: CacheDesc, key: CacheKey, num_bytes: int, direction: str) -> bool:
    """Pull while the network is cut after so many bytes; return whether the pull succeeded."""
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.cut_after(num_bytes, direction)
    try:
        pair.dm.pull_cache(key, target)
        assert_slot(pair, target, 0, pattern(desc, 5)[:, 0])
    except LLMException as error:
        assert error.status_code == TIMEOUT
        return False
    finally:
        pair.forwarder.release()
        pair.dm.deallocate_cache(target)
    return True


@pytest.mark.histories
@pytest.mark.first_case
@row("E78")
@pytest.mark.parametrize("direction", ["requests", "answers"])
@over_tcp
def test_a_connection_that_is_cut_anywhere_in_a_pull(make_pair, direction):
    pair = make_pair(pool=1 << 20, forwarded=True)
    desc, key = byte_desc(1, 5000), CacheKey(1, 5)
    before = pair.forwarder.num_forwarded[direction]
    bound(pair, desc, [key], seed=5)
    assert cut_pull(pair, desc, key, 1 << 30, direction)
    total = pair.forwarder.num_forwarded[direction] - before
    outcomes = []
    for num_bytes in (0, 1, 3, total // 3, total // 2, total - 40, total - 5, total - 1):
        pair.call(write_new_cache, pair.pm, desc, [key], seed=5)
        outcomes.append(cut_pull(pair, desc, key, num_bytes, direction))
        if not outcomes[-1]:
            assert_not_usable(pair)
        assert pair.unlink() != NOT_YET
        pair.link()
        if not outcomes[-1]:
            assert_pullable(pair, key, desc, 0, seed=5)
        pair.pm.remove_cache_key(key)
    assert not any(outcomes[:3])


def assert_not_usable(pair) -> None:
    target = pair.dm.allocate_cache(byte_desc(1, 1))
    with fails_with(NOT_YET):
        pair.dm.pull_cache(CacheKey(1, 5), target)
    pair.dm.deallocate_cache(target)


@row("E78")
@in_two_processes_over_tcp
def test_a_prompt_that_is_killed_in_a_pull(make_pair):
    pair = make_pair(pool=1 << 26, forwarded=True)
    desc, key = byte_desc(1, 1 << 23), CacheKey(1, 5)  # more than connections take that nobody reads
    bound(pair, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.hold_after(1 << 16)
    codes = []

    def pull() -> None:
        with fails_with(TIMEOUT):
            pair.dm.pull_cache(key, target)
        codes.append(TIMEOUT)

    pulling = threading.Thread(target=pull)
    pulling.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    pair.process.kill()
    pair.forwarder.release()
    pulling.join()
    assert codes == [TIMEOUT]


@row("E78")
@over_tcp
def test_a_bit_that_changes_on_the_way(make_pair):
    pair = make_pair(forwarded=True)
    desc, key = byte_desc(1, 1000), CacheKey(1, 5)
    before = pair.forwarder.num_forwarded["answers"]
    bound_only(pair, desc, [key], seed=5)
    assert_pullable(pair, key, desc, 0, seed=5)
    total = pair.forwarder.num_forwarded["answers"] - before
    target = pair.dm.allocate_cache(desc)
    for position in (total // 4, total // 2, total * 3 // 4):
        bound_only(pair, desc, [key], seed=5)
        pair.forwarder.flip_bit_after(position)
        with fails_with(TIMEOUT):
            pair.dm.pull_cache(key, target)
        assert pair.unlink() != NOT_YET
        pair.link()
        assert_pullable(pair, key, desc, 0, seed=5)


@pytest.mark.histories
@pytest.mark.first_case
@row("E78")
@over_tcp
def test_a_prompt_that_is_finalized_in_a_pull(make_pair):
    pair = make_pair(pool=1 << 27, forwarded=True)
    desc, key = byte_desc(1, 1 << 24), CacheKey(1, 5)  # more than all buffers on the way hold
    bound_only(pair, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.hold_after(1 << 16)
    codes = []

    def pull() -> None:
        with fails_with(TIMEOUT):
            pair.dm.pull_cache(key, target)
        codes.append(TIMEOUT)

    pulling = threading.Thread(target=pull)
    pulling.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    pair.prompt.finalize()
    assert not pair.pm.is_initialized()
    pair.forwarder.release()
    pulling.join()
    assert codes == [TIMEOUT]
