"""Links from the inside: what both ends know of them, and pulls that need several requests."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from raw_peers import DECODER_ID, PROMPT_ID, RawDecoder, address_of, started
from sides import set_timeout, transports_of

import subprocesses
from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode
from quire.datadist.interface import pulls
from quire.datadist.links import decoder_links
from quire.datadist.transports import tcp
from quire.datadist.wire import sockets

DESC = CacheDesc(3, [20, 6], DataType.DT_UINT8)


@pytest.fixture
def pair():
    with (
        started(LLMRole.PROMPT, PROMPT_ID, transports="tcp") as prompt,
        started(LLMRole.DECODER, DECODER_ID) as decoder,
    ):
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
        yield prompt, decoder


def numbered(manager, kv_cache) -> np.ndarray:
    """Fill a cache with bytes that tell where they are, and return them [tensors, blocks, bytes]."""
    arrays = [manager.get_cache_tensors(kv_cache, index)[0].numpy() for index in range(3)]
    for index, array in enumerate(arrays):
        array[:] = (np.arange(array.size).reshape(array.shape) * 7 + 31 * index) % 251
    return np.stack(arrays)


def test_both_ends_know_the_transport(pair):
    prompt, decoder = pair
    assert transports_of(decoder) == {PROMPT_ID: "tcp"}
    assert transports_of(prompt) == {DECODER_ID: "tcp"}
    decoder.unlink_clusters([address_of(prompt)])
    assert transports_of(decoder) == {}
    assert transports_of(prompt) == {}


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_more_blocks_than_fit_into_a_message_are_pulled_in_several(pair, limit, monkeypatch):
    monkeypatch.setattr(pulls, "MAX_BLOCK_RUNS", limit)
    monkeypatch.setattr(tcp, "MIN_SHARE_BYTES", 8)  # several streams, too
    prompt, decoder = pair
    source = prompt.kv_cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(PROMPT_ID))
    target = decoder.kv_cache_manager.allocate_blocks_cache(DESC)
    content = numbered(prompt.kv_cache_manager, source)
    from_blocks, to_blocks = [3, 19, 4, 5, 0, 3, 2], (1, 0, 2, 3, 19, 9, 8)
    decoder.kv_cache_manager.pull_blocks(BlocksCacheKey(PROMPT_ID), target, from_blocks, to_blocks)
    expected = np.zeros_like(content)
    expected[:, to_blocks] = content[:, from_blocks]
    for index in range(3):
        found = decoder.kv_cache_manager.get_cache_tensors(target, index)[0].numpy()
        assert np.array_equal(found, expected[index])


def test_no_more_links_than_the_limit_of_a_decoder(pair, monkeypatch):
    monkeypatch.setattr(decoder_links, "MAX_LINKS", 1)
    _, decoder = pair
    with started(LLMRole.PROMPT, 77) as other:
        assert decoder.link_clusters([address_of(other, 77)])[0] is LLMStatusCode.LLM_LINK_FAILED
    assert transports_of(decoder) == {PROMPT_ID: "tcp"}


@pytest.mark.parametrize("error", [OSError("cut"), RuntimeError("no thread"), MemoryError()])
def test_a_fault_at_the_destination_breaks_the_link_and_keeps_the_key(pair, error, monkeypatch):
    prompt, decoder = pair
    prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
    target = decoder.kv_cache_manager.allocate_cache(DESC)

    def fail(*_arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tcp.TcpDestinationEnd, "receive", fail)
        with pytest.raises(LLMException) as raised:
            decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
    assert raised.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    decoder.unlink_clusters([address_of(prompt)])
    assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
    decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)


def test_a_fault_at_the_source_ends_that_link_only(pair, monkeypatch, caplog):
    prompt, decoder = pair
    prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
    target = decoder.kv_cache_manager.allocate_cache(DESC)

    def fail(*_arguments):
        raise ZeroDivisionError

    with RawDecoder(prompt, cluster_id=9).link() as other:
        with monkeypatch.context() as patch:
            patch.setattr(tcp.TcpSourceEnd, "send", fail)
            with pytest.raises(LLMException) as raised:
                decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
        assert raised.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert not other.channel.has_something()
    decoder.unlink_clusters([address_of(prompt)])
    assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS
    decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
    assert "ZeroDivisionError" in caplog.text


def test_an_interrupted_pull_breaks_the_link_and_writes_no_more(pair, monkeypatch):
    prompt, decoder = pair
    prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
    target = decoder.kv_cache_manager.allocate_cache(DESC)

    receive_into = sockets.receive_into

    def interrupt(*arguments):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        receive_into(*arguments)

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "receive_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
    assert threading.active_count() <= before
    with pytest.raises(LLMException) as raised:
        decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
    assert raised.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK


def test_no_thread_for_a_link_is_a_failed_link(pair, monkeypatch):
    prompt, decoder = pair
    decoder.unlink_clusters([address_of(prompt)])
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "datadist-link":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_LINK_FAILED
    assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_SUCCESS


def test_the_longest_time_limit_can_be_waited_for():
    with started(LLMRole.PROMPT, PROMPT_ID) as prompt, started(LLMRole.DECODER, DECODER_ID) as decoder:
        longest = 2**31 - 1
        assert decoder.link_clusters([address_of(prompt)], timeout=longest)[0] is LLMStatusCode.LLM_SUCCESS
        prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT_ID, 5)])
        set_timeout(decoder.kv_cache_manager, longest)
        target = decoder.kv_cache_manager.allocate_cache(DESC)
        decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
        assert decoder.unlink_clusters([address_of(prompt)], timeout=longest)[0] is LLMStatusCode.LLM_SUCCESS


def test_names_are_imported_when_they_are_used():
    code = "import sys, quire.datadist as dd; dd.LLMStatusCode, dd.LLMRole; print('torch' in sys.modules)"
    assert subprocesses.python_output(code).strip() == "False"
