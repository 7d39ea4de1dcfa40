"""Roles that change or are both, and links that are asked whether they are usable."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from pairs import TRANSPORTS
from sides import (
    byte_desc,
    link_of,
    pattern,
    read_cache,
    session_of,
    set_timeout,
    use_of,
    write_new_blocks,
    write_new_cache,
)

from quire.datadist import (
    BlocksCacheKey,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    ModelConfig,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
SUCCESS = LLMStatusCode.LLM_SUCCESS
LISTEN = {"llm.listenIpInfo": "127.0.0.1:0"}


def link(side: LLMDataDist, other: LLMDataDist) -> None:
    assert side.link_clusters([address_of(other)], sides.PATIENT)[0] is SUCCESS


def address_of(side: LLMDataDist):
    return sides.cluster_info(side.cluster_id, side.listen_port or 0)


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@row("role MIX")
def test_each_of_two_sides_pulls_from_the_other_and_pushes_to_it(new_datadist, transport):
    first, second = (new_datadist(LLMRole.MIX, number) for number in (1, 2))
    for side in (first, second):
        side.init(sides.options(listen="127.0.0.1:0", transport=transport))
    desc = byte_desc(3)
    for side, other, seed in ((first, second, 1), (second, first, 2)):
        link(side, other)
        manager = other.cache_manager
        write_new_blocks(manager, desc, BlocksCacheKey(other.cluster_id), seed=seed)
        source = write_new_cache(manager, desc, [CacheKey(other.cluster_id, 5)], seed=seed)
        target = side.cache_manager.allocate_cache(desc)
        side.cache_manager.pull_cache(CacheKey(other.cluster_id, 5), target, 1)
        np.testing.assert_array_equal(read_cache(side.cache_manager, target)[:, 1], pattern(desc, seed)[:, 0])
        assert source.cache_desc is desc
        taken = sides.register_new(side.cache_manager, desc, BlocksCacheKey(side.cluster_id, 9), seed=7)
        blocks = write_new_blocks(manager, desc, seed=8)
        manager.push_blocks(BlocksCacheKey(side.cluster_id, 9), blocks, [2], [0])
        np.testing.assert_array_equal(sides.owned_bytes(taken)[:, 0], pattern(desc, 8)[:, 2])
        side.check_link_status(other.cluster_id)
        with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
            side.add_model(model_options(), sides.Runner(side))
    assert first.unlink_clusters([address_of(second)])[0] is SUCCESS
    for side, other in ((first, second), (second, first)):
        with fails_with(NOT_LINKED):
            side.check_link_status(other.cluster_id)


def model_options():
    config = ModelConfig()
    config.kv_shapes, config.kv_dtypes = ["2,3"], [DataType.DT_INT8]
    return config.generate_options()


@row("role MIX")
def test_a_mix_without_an_address_only_links(new_datadist, prompt):
    side = new_datadist(LLMRole.MIX, 2)
    side.init(sides.options())
    assert side.listen_port is None
    link(side, prompt)
    write_new_cache(prompt.kv_cache_manager, byte_desc(), [CacheKey(1, 5)], seed=1)
    target = side.cache_manager.allocate_cache(byte_desc(), [CacheKey(2, 5)])
    side.cache_manager.pull_cache(CacheKey(1, 5), target)
    side.complete_request(sides.LLMReq(5))
    side.cache_manager.deallocate_cache(target)
    assert sides.num_free_bytes(side.cache_manager) == sides.POOL
    assert prompt.unlink_clusters([address_of(side)])[0] is SUCCESS
    with fails_with(NOT_LINKED):
        side.check_link_status(1)


@row("LLMDataDist.cache_manager")
def test_both_names_of_the_manager(decoder):
    assert decoder.cache_manager is decoder.kv_cache_manager
    decoder.finalize()
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        decoder.cache_manager  # noqa: B018


@row("switch_role")
def test_sides_change_roles_and_keep_their_caches(new_datadist, transport):
    first, second = new_datadist(LLMRole.PROMPT, 1), new_datadist(LLMRole.DECODER, 2)
    first.init(sides.options(listen="127.0.0.1:0", transport=transport))
    second.init(sides.options(transport=transport))
    managers = first.cache_manager, second.cache_manager
    desc = byte_desc(3)
    target = write_new_blocks(first.cache_manager, desc, BlocksCacheKey(1), seed=1)
    source = write_new_blocks(second.cache_manager, desc, seed=2)
    link(second, first)
    second.cache_manager.pull_blocks(BlocksCacheKey(1), source, [0], [0])
    for side in (first, second):
        with fails_with(LLMStatusCode.LLM_EXIST_LINK):
            side.switch_role(LLMRole.MIX)
    second.unlink_clusters([address_of(first)])
    first.switch_role(LLMRole.DECODER)
    assert (first.role, first.listen_port) == (LLMRole.DECODER, None)
    second.switch_role(LLMRole.PROMPT, LISTEN)
    assert (second.role, second.listen_port is None) == (LLMRole.PROMPT, False)
    assert (first.cache_manager, second.cache_manager) == managers
    link(first, second)
    new = write_new_cache(second.cache_manager, desc, [CacheKey(2, 5)], seed=3)
    slots = first.cache_manager.allocate_cache(desc)
    first.cache_manager.pull_cache(CacheKey(2, 5), slots)
    np.testing.assert_array_equal(read_cache(first.cache_manager, slots)[:, 0], pattern(desc, 3)[:, 0])
    with fails_with(INVALID):
        second.cache_manager.pull_blocks(BlocksCacheKey(1), source, [0], [0])
    assert (target.cache_id, new.cache_id) == (1, 2)


@row("switch_role")
def test_what_cannot_be_switched_changes_nothing(prompt):
    port = prompt.listen_port
    for role, options in (
        (LLMRole.PROMPT, None),
        (LLMRole.PROMPT, {"other": "x"}),
        (LLMRole.PROMPT, {"llm.listenIpInfo": "here"}),
        (LLMRole.MIX, {"llm.listenIpInfo": "1.2.3:4"}),
    ):
        with fails_with(INVALID):
            prompt.switch_role(role, options)
    with socket.create_server(("127.0.0.1", 0)) as taken, fails_with(LLMStatusCode.LLM_FAILED):
        prompt.switch_role(LLMRole.MIX, {"llm.listenIpInfo": f"127.0.0.1:{taken.getsockname()[1]}"})
    with pytest.raises(TypeError):
        prompt.switch_role("MIX")
    with pytest.raises(TypeError):
        prompt.switch_role(LLMRole.MIX, {"llm.listenIpInfo": 5})
    with session_of(prompt)._linking:
        session_of(prompt)._options = dataclasses.replace(session_of(prompt)._options, timeout=0.01)
        with fails_with(LLMStatusCode.LLM_PROCESSING_LINK):
            prompt.switch_role(LLMRole.DECODER)
    set_timeout(prompt.cache_manager, 10)
    with prompt.cache_manager.call(), fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
        prompt.switch_role(LLMRole.DECODER)
    assert (prompt.role, prompt.listen_port) == (LLMRole.PROMPT, port)
    prompt.switch_role(LLMRole.MIX, {"llm.listenIpInfo": f"127.0.0.1:{port}"})
    assert (prompt.role, prompt.listen_port) == (LLMRole.MIX, port)
    prompt.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{port}"})
    prompt.add_model(model_options(), sides.Runner(prompt))
    with fails_with(INVALID):
        prompt.switch_role(LLMRole.DECODER)
    prompt.finalize()
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        prompt.switch_role(LLMRole.DECODER)


@row("check_link_status")
def test_a_link_is_asked(pair):
    pair.decoder.check_link_status(1)
    pair.prompt.check_link_status(2)
    for side in (pair.prompt, pair.decoder):
        with fails_with(NOT_LINKED):
            side.check_link_status(77)
        for wrong, error in ((None, TypeError), (-1, ValueError)):
            with pytest.raises(error):
                side.check_link_status(wrong)
    with use_of(link_of(pair.decoder)), fails_with(LLMStatusCode.LLM_LINK_BUSY):
        pair.decoder.check_link_status(1)
    pair.decoder.check_link_status(1)
    pair.prompt.unlink_clusters([pair.itself], sides.PATIENT)
    for side, other in ((pair.prompt, 2), (pair.decoder, 1)):
        with fails_with(NOT_LINKED):
            side.check_link_status(other)
    pair.decoder.finalize()
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        pair.decoder.check_link_status(1)


@row("check_link_status")
def test_a_peer_that_does_not_answer_breaks_the_link(make_pair):
    pair = make_pair(timeout=300, forwarded=True)
    pair.forwarder.hold()
    with fails_with(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
        pair.decoder.check_link_status(1)
    with fails_with(NOT_LINKED):
        pair.decoder.check_link_status(1)
    pair.forwarder.release()


@row("check_link_status")
def test_a_peer_that_is_gone_breaks_the_link(make_pair):
    pair = make_pair(forwarded=True)
    pair.forwarder.cut()
    for _ in range(2):
        with fails_with(NOT_LINKED):
            pair.decoder.check_link_status(1)


@row("LLMConfig of the second interface")
def test_further_options():
    config = LLMConfig()
    flags = ("enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role")
    assert [getattr(config, name) for name in flags] == [False] * 3
    for name in flags:
        setattr(config, name, name != "enable_switch_role")
    texts = {"local_comm_res": "", "mem_pool_cfg": '{"memory_pool_config": []}', "transfer_backend": "hccs"}
    numbers = {"link_total_time": 30, "link_retry_count": 0}
    for name, value in (texts | numbers).items():
        assert getattr(config, name) is None
        setattr(config, name, value)
        assert getattr(config, name) == value
    assert config.generate_options() == {
        "llm.EnableCacheManager": "1",
        "llm.EnableRemoteCacheAccessible": "1",
        "llm.EnableSwitchRole": "0",
        "llm.LocalCommRes": "",
        "llm.MemPoolConfig": '{"memory_pool_config": []}',
        "llm.TransferBackend": "hccs",
        "llm.LinkTotalTime": "30",
        "llm.LinkRetryCount": "0",
    }
    for name in (*flags, *texts, *numbers):
        for value in (None, 1.5, ["1"]):
            with pytest.raises(TypeError):
                setattr(config, name, value)
    with pytest.raises(TypeError):
        config.enable_cache_manager = 1
    for name, value in (("mem_pool_cfg", "{"), ("link_total_time", -1), ("link_retry_count", 2**31)):
        with pytest.raises(ValueError, match=name):
            setattr(config, name, value)
