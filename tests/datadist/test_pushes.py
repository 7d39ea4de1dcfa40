"""Pushes: a PROMPT writes into caches that a DECODER has registered."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from pair_checks import bound_blocks
from pairs import CROSSED_PAIRS, PairMaker, in_two_processes, with_pairs
from sides import byte_desc, link_of, owned_bytes, pattern, register_new, use_of, write_new_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
)
from quire.datadist.interface import pulls as pulls_module
from quire.datadist.links import prompt_link, push_receiver
from quire.datadist.links.prompt_link import PromptLink
from quire.datadist.links.push_sender import PushSender
from quire.datadist.transports.interface import LinkTerms


@pytest.fixture(params=CROSSED_PAIRS)
def make_pair(request, prompt_process):
    with contextlib.ExitStack() as stack:
        yield PairMaker(request.param, prompt_process, stack)


INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
TO = BlocksCacheKey(2)


@row("push_blocks")
@pytest.mark.parametrize("is_registered_first", [False, True])
def test_blocks_are_pushed_into_registered_memory(make_pair, is_registered_first):
    pair = make_pair(linked=not is_registered_first)
    desc = byte_desc(6)
    target = register_new(pair.dm, desc, TO, seed=2)
    if is_registered_first:
        pair.link()
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    expected = pattern(desc, 2)
    for key, from_blocks, to_blocks in (
        (TO, [5, 0, 1], [0, 2, 1]),
        (CacheKeyByIdAndIndex(2, target.cache_id), [4, 4], [3, 5]),
        (TO, [], []),
    ):
        pair.pm.push_blocks(key, source, from_blocks, to_blocks)
        expected[:, to_blocks] = pattern(desc, 1)[:, from_blocks]
        np.testing.assert_array_equal(owned_bytes(target), expected)
    pair.dm.pull_blocks(BlocksCacheKey(1), target, [2], [4])
    expected[:, 4] = pattern(desc, 1)[:, 2]
    pair.pm.push_blocks(dst_cache_key=TO, src_cache=source, src_blocks=[3], dst_blocks=[4])
    expected[:, 4] = pattern(desc, 1)[:, 3]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    pair.dm.unregister_cache(target.cache_id)
    with fails_with(NOT_EXIST):
        pair.pm.push_blocks(TO, source, [0], [0])
    assert pair.unlink() is LLMStatusCode.LLM_SUCCESS
    with fails_with(NOT_LINKED):
        pair.pm.push_blocks(TO, source, [0], [0])


@row("push_blocks")
@pytest.mark.parametrize(
    ("source_layers", "target_layers", "num"),
    [(range(1, 2), range(0, 1), 2), (range(0, 4), range(2, 6), 1), (range(0, 2), None, 2)],
)
def test_layers_are_pushed(pair, source_layers, target_layers, num):
    desc = byte_desc(3, 16, 6)
    own = desc if target_layers is not None else byte_desc(3, 16, 4)
    target = register_new(pair.dm, own, TO, seed=2)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    layers = {"src_layer_range": source_layers, "dst_layer_range": target_layers}
    pair.pm.push_blocks(TO, source, [2, 0], [0, 1], **layers, tensor_num_per_layer=num)
    expected, first = pattern(own, 2), target_layers.start * num if target_layers else 0
    rows = slice(source_layers.start * num, source_layers.stop * num)
    expected[first : first + len(source_layers) * num, :2] = pattern(desc, 1)[rows][:, [2, 0]]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    for bad in ({"src_layer_range": range(0, 2, 2)}, {"dst_layer_range": range(2, 5)}):
        with fails_with(INVALID):
            pair.pm.push_blocks(TO, source, [0], [0], **bad)
    np.testing.assert_array_equal(owned_bytes(target), expected)


@row("push_cache")
def test_slots_are_pushed(pair):
    desc = byte_desc(3)
    target = register_new(pair.dm, desc, seed=2, is_blocks=False)
    source = pair.call(write_new_cache, pair.pm, desc, seed=1)
    key = CacheKeyByIdAndIndex(2, target.cache_id, 1)
    pair.pm.push_cache(key, source, 2)
    expected = pattern(desc, 2)
    expected[:, 1] = pattern(desc, 1)[:, 2]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    pair.pm.push_cache(key, source, size=10, src_layer_range=range(1), dst_layer_range=range(1, 2))
    expected[2:, 1, :10] = pattern(desc, 1)[:2, 0, :10]
    np.testing.assert_array_equal(owned_bytes(target), expected)
    longer = pair.call(write_new_cache, pair.pm, byte_desc(1, 65), seed=3)
    for wrong in (
        lambda: pair.pm.push_cache(key, longer),
        lambda: pair.pm.push_cache(key, source, 3),
        lambda: pair.pm.push_cache(key, source, size=65),
        lambda: pair.pm.push_cache(CacheKeyByIdAndIndex(2, target.cache_id, 3), source),
        lambda: pair.pm.push_blocks(CacheKeyByIdAndIndex(2, target.cache_id), source, [0], [0]),
    ):
        with fails_with(INVALID):
            wrong()
    pair.pm.push_cache(key, longer, size=64)
    expected[:, 1] = pattern(byte_desc(1, 65), 3)[:, 0, :64]
    np.testing.assert_array_equal(owned_bytes(target), expected)


@row("push_blocks", "push_cache")
def test_pushes_that_do_not_fit_write_nothing(pair):
    desc = byte_desc(4)
    target = register_new(pair.dm, desc, TO, seed=2)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    others = [
        bound_blocks(pair, other, BlocksCacheKey(1, number), seed=1)
        for number, other in enumerate(
            (byte_desc(4, 63), byte_desc(4, 64, 2), CacheDesc(4, [4, 64], DataType.DT_INT8)), 1
        )
    ]
    allocated = pair.dm.allocate_blocks_cache(desc)
    slots = pair.call(write_new_cache, pair.pm, desc, seed=3)
    for key, cache, from_blocks, to_blocks in (
        (TO, source, [0], [4]),
        (TO, source, [4], [0]),
        (TO, source, [0, 1], [1, 1]),
        (TO, source, [0, 1], [1]),
        (TO, source, [0], [2**63]),
        (TO, slots, [0], [0]),
        (CacheKeyByIdAndIndex(2, target.cache_id, 1), source, [0], [0]),
        (CacheKeyByIdAndIndex(2, allocated.cache_id), source, [0], [0]),
        *((TO, other, [0], [0]) for other in others),
    ):
        with fails_with(INVALID):
            pair.pm.push_blocks(key, cache, from_blocks, to_blocks)
    for key in (BlocksCacheKey(2, 9), CacheKeyByIdAndIndex(2, 99)):
        with fails_with(NOT_EXIST):
            pair.pm.push_blocks(key, source, [0], [0])
    with fails_with(NOT_LINKED):
        pair.pm.push_blocks(BlocksCacheKey(77), source, [0], [0])
    with fails_with(INVALID):
        pair.pm.push_cache(CacheKeyByIdAndIndex(2, target.cache_id), source)
    np.testing.assert_array_equal(owned_bytes(target), pattern(desc, 2))
    assert not sides.read_cache(pair.dm, allocated).any()
    pair.pm.push_blocks(TO, source, [0], [0])  # the link still works


@row("push_blocks")
def test_who_pushes_and_into_what(pair):
    source = bound_blocks(pair, byte_desc(), BlocksCacheKey(1), seed=1)
    with fails_with(INVALID):
        pair.pm.push_blocks(TO, source, [0], [0])  # nothing is registered
    own = register_new(pair.dm, byte_desc(), TO, seed=2)
    with fails_with(INVALID):
        pair.dm.push_blocks(BlocksCacheKey(1), own, [0], [0])
    with fails_with(INVALID):
        pair.dm.push_cache(CacheKeyByIdAndIndex(1, 1), own)
    for wrong in (
        lambda: pair.pm.push_blocks(CacheKey(2, 1), source, [0], [0]),
        lambda: pair.pm.push_blocks(TO, None, [0], [0]),
        lambda: pair.pm.push_blocks(TO, source, None, [0]),
        lambda: pair.pm.push_blocks(TO, source, [0], [0], src_layer_range=[0]),
        lambda: pair.pm.push_cache(TO, source),
        lambda: pair.pm.push_cache(CacheKeyByIdAndIndex(2, 1), source, size=1.5),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="size"):
        pair.pm.push_cache(CacheKeyByIdAndIndex(2, 1), source, size=0)
    pair.pm.push_blocks(TO, source, [0], [0])


@row("push_blocks")
def test_more_blocks_than_fit_into_a_message_are_pushed_in_several(make_pair, monkeypatch):
    monkeypatch.setattr(pulls_module, "MAX_BLOCK_RUNS", 3)
    pair = make_pair()
    desc = byte_desc(11)
    target = register_new(pair.dm, desc, TO, seed=2)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    order = [7, 3, 9, 1, 0, 10, 5]
    pair.pm.push_blocks(TO, source, list(range(7)), order)
    np.testing.assert_array_equal(owned_bytes(target)[:, order], pattern(desc, 1)[:, :7])


@row("push_blocks")
def test_pushes_and_pulls_over_one_link_wait_for_each_other(make_pair):
    pair = make_pair(pool=1 << 22)
    desc = byte_desc(8, 20_000)
    pushed = register_new(pair.dm, desc, TO, seed=2)
    pulled = pair.dm.allocate_blocks_cache(desc)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    errors = []

    def pull() -> None:
        try:
            for _ in range(10):
                pair.dm.pull_blocks(BlocksCacheKey(1), pulled, [0, 2, 4], [1, 3, 5])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    for _ in range(10):
        pair.pm.push_blocks(TO, source, [1, 2, 3], [0, 4, 6])
    thread.join()
    assert not errors
    np.testing.assert_array_equal(owned_bytes(pushed)[:, [0, 4, 6]], pattern(desc, 1)[:, [1, 2, 3]])
    np.testing.assert_array_equal(
        sides.read_cache(pair.dm, pulled)[:, [1, 3, 5]], pattern(desc, 1)[:, [0, 2, 4]]
    )


@row("push_blocks")
def test_a_push_over_a_link_that_is_in_use_is_refused_in_time(make_pair, monkeypatch):
    assert push_receiver.WAITING_SHARE < 1
    monkeypatch.setattr(push_receiver, "WAITING_SHARE", 0.01)  # however late, the refusal is heard in time
    pair = make_pair()
    register_new(pair.dm, byte_desc(), TO, seed=2)
    target = register_new(pair.dm, byte_desc(), BlocksCacheKey(2, 1), seed=2)
    source = bound_blocks(pair, byte_desc(), BlocksCacheKey(1), seed=1)
    pair.call(sides.set_timeout, pair.pm, 20_000)
    with use_of(link_of(pair.decoder)), fails_with(TIMEOUT):
        pair.pm.push_blocks(BlocksCacheKey(2, 1), source, [0], [1])
    pair.call(sides.set_timeout, pair.pm, sides.PATIENT)
    pair.pm.push_blocks(BlocksCacheKey(2, 1), source, [0], [1])  # nothing broke
    assert target.cache_id == 2


@row("push_blocks")
@with_pairs("one-process", "tcp")
def test_a_push_waits_for_the_end_of_the_registration_that_allows_it(make_pair, monkeypatch):
    is_pushing, push = threading.Event(), PromptLink.push

    class SlowSender(PushSender):
        def announce(self):
            super().announce()  # the DECODER knows now
            assert is_pushing.wait(sides.PATIENT / 1000)

    def push_and_tell(link, *arguments):
        is_pushing.set()
        push(link, *arguments)

    monkeypatch.setattr(prompt_link, "PushSender", SlowSender)
    monkeypatch.setattr(PromptLink, "push", push_and_tell)
    pair = make_pair()
    target = register_new(pair.dm, byte_desc(), TO, seed=2)
    source = bound_blocks(pair, byte_desc(), BlocksCacheKey(1), seed=1)
    pair.pm.push_blocks(TO, source, [0], [1])
    np.testing.assert_array_equal(owned_bytes(target)[:, 1], pattern(byte_desc(), 1)[:, 0])


@row("push_blocks")
@in_two_processes
def test_a_prompt_that_dies_ends_its_pushes(make_pair):
    pair = make_pair()
    target = register_new(pair.dm, byte_desc(), TO, seed=2)
    pair.process.kill()
    with fails_with(NOT_LINKED):
        pair.decoder.check_link_status(1)
    pair.dm.unregister_cache(target.cache_id)


@row("push_blocks")
@pytest.mark.parametrize("how", ["link.drop", "finalize", "forced unlink"])
def test_a_decoder_that_ends_the_link_fails_pushes(make_pair, how):
    pair = make_pair()
    register_new(pair.dm, byte_desc(), TO, seed=2)
    source = bound_blocks(pair, byte_desc(), BlocksCacheKey(1), seed=1)
    if how == "link.drop":
        link_of(pair.decoder).drop()
    elif how == "finalize":
        pair.decoder.finalize()
    else:
        pair.unlink(force=True)
    with fails_with(NOT_LINKED):
        pair.pm.push_blocks(TO, source, [0], [0])


@row("push_blocks")
def test_a_cache_is_registered_although_a_prompt_is_gone(make_pair, caplog, monkeypatch):
    pair = make_pair()
    nowhere = LinkTerms(1, ("127.0.0.1", 1), b"", use_checksum=True)
    monkeypatch.setattr(link_of(pair.decoder), "_terms", nowhere)
    target = register_new(pair.dm, byte_desc(), TO, seed=2)
    assert "PROMPT 1 cannot push" in caplog.text
    source = bound_blocks(pair, byte_desc(), BlocksCacheKey(1), seed=1)
    with fails_with(INVALID):
        pair.pm.push_blocks(TO, source, [0], [0])
    pair.dm.pull_blocks(BlocksCacheKey(1), target, [0], [0])


def push_again_and_again(pair, source) -> None:
    for _ in range(20):
        pair.pm.push_blocks(TO, source, [0], [0])


@row("push_blocks")
@pytest.mark.parametrize("is_before_the_data", [True, False])
def test_a_push_that_is_cut_breaks_the_link(make_pair, is_before_the_data):
    pair = make_pair(pool=1 << 20, forwarded=True)
    desc = byte_desc(2, 20_000)
    target = register_new(pair.dm, desc, TO, seed=2)
    source = bound_blocks(pair, desc, BlocksCacheKey(1), seed=1)
    pair.forwarder.cut_after(0 if is_before_the_data else 150)
    with pytest.raises(LLMException) as caught:
        push_again_and_again(pair, source)
    assert caught.value.status_code in {TIMEOUT, NOT_LINKED}
    with fails_with(NOT_LINKED):
        pair.pm.push_blocks(TO, source, [0], [0])
    assert pair.unlink() is LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
    pair.link()
    pair.pm.push_blocks(TO, source, [0], [1])
    np.testing.assert_array_equal(owned_bytes(target)[:, 1], pattern(desc, 1)[:, 0])
