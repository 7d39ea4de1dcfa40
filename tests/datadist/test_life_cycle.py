"""From `init` to `finalize`."""

from __future__ import annotations

import socket
import sys
import threading

import pytest
from conformance import row
from failing import fails_with
from sides import PATIENT, Runner, byte_desc, cluster_info, options, start_decoder, start_prompt

import subprocesses
from quire.datadist import CacheKey, DataType, LLMDataDist, LLMReq, LLMRole, LLMStatusCode, ModelConfig

PEER = cluster_info(1, 26000)
ADDRESS = {"llm.listenIpInfo": "127.0.0.1:0"}
DEVICE = {"ge.exec.deviceId": "0"}


@row("E12")
@pytest.mark.parametrize(
    ("role", "given"),
    [
        (LLMRole.PROMPT, DEVICE),
        (LLMRole.PROMPT, ADDRESS),
        (LLMRole.DECODER, {}),
        (LLMRole.DECODER, ADDRESS),
        (LLMRole.PROMPT, {**DEVICE, "llm.listenIpInfo": "nowhere"}),
        (LLMRole.DECODER, {"ge.exec.deviceId": "first"}),
        (LLMRole.DECODER, {**DEVICE, "llm.SyncKvCacheWaitTime": "soon"}),
        (LLMRole.DECODER, {**DEVICE, "ge.flowGraphMemMaxSize": "much"}),
        (LLMRole.DECODER, {**DEVICE, "quire.device": "abacus"}),
    ],
)
def test_options_that_are_missing_or_malformed(new_datadist, role, given):
    made = new_datadist(role)
    with fails_with(LLMStatusCode.LLM_PARAM_INVALID):
        made.init({"quire.device": "cpu", **given})
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        _ = made.kv_cache_manager
    made.init({**ADDRESS, **DEVICE, "quire.device": "cpu"})


@row("E12", "LLMDataDist")
def test_a_decoder_ignores_an_address_to_listen_at(new_datadist):
    decoder, prompt = new_datadist(LLMRole.DECODER, 2), new_datadist(LLMRole.PROMPT, 1)
    assert prompt.listen_port is None
    decoder.init({**ADDRESS, **DEVICE, "quire.device": "cpu", "unknown": "ignored"})
    prompt.init({**ADDRESS, **DEVICE, "quire.device": "cpu"})
    assert decoder.kv_cache_manager.is_initialized()
    assert decoder.listen_port is None
    assert prompt.listen_port > 0
    assert (decoder.role, decoder.cluster_id) == (LLMRole.DECODER, 2)


@row("E12")
def test_a_port_that_is_taken(prompt, new_datadist):
    other = new_datadist(LLMRole.PROMPT, 5)
    with fails_with(LLMStatusCode.LLM_FAILED):
        other.init(options(listen=f"127.0.0.1:{prompt.listen_port}"))
    other.init(options(listen="127.0.0.1:0"))


@row("E13")
def test_init_twice(prompt, decoder):
    for side in (prompt, decoder):
        manager = side.kv_cache_manager
        with fails_with(LLMStatusCode.LLM_REPEAT_REQUEST):
            side.init(options(listen="127.0.0.1:0"))
        assert manager.is_initialized()


def assert_unusable(side: LLMDataDist) -> None:
    for call in (
        lambda: side.kv_cache_manager,
        lambda: side.add_model(ModelConfig().generate_options()),
        lambda: side.link_clusters([PEER]),
        lambda: side.unlink_clusters([PEER]),
        lambda: side.complete_request(LLMReq(req_id=1)),
    ):
        with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
            call()


@row("E14")
@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.DECODER])
def test_nothing_works_before_init_and_after_finalize(new_datadist, role):
    side = new_datadist(role)
    assert_unusable(side)
    side.init(options(listen="127.0.0.1:0"))
    manager = side.kv_cache_manager
    cache = manager.allocate_cache(byte_desc())
    blocks = manager.allocate_blocks_cache(byte_desc())
    side.finalize()
    assert_unusable(side)
    assert not manager.is_initialized()
    for call in (
        lambda: manager.allocate_cache(byte_desc()),
        lambda: manager.deallocate_cache(cache),
        lambda: manager.remove_cache_key(CacheKey(1, 1)),
        lambda: manager.pull_cache(CacheKey(1, 1), cache),
        lambda: manager.copy_cache(cache, cache),
        lambda: manager.get_cache_tensors(cache),
        lambda: manager.allocate_blocks_cache(byte_desc()),
        lambda: manager.copy_blocks(blocks, {}),
    ):
        with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
            call()


@row("E14")
def test_a_model_is_of_no_use_after_finalize(new_datadist):
    side = new_datadist(LLMRole.PROMPT)
    side.init(options(listen="127.0.0.1:0"))
    config = ModelConfig()
    config.kv_shapes, config.kv_dtypes = ["2,4"], [DataType.DT_FLOAT]
    model = side.add_model(config.generate_options(), Runner(side))
    side.finalize()
    with fails_with(LLMStatusCode.LLM_ENGINE_FINALIZED):
        model.predict(LLMReq(req_id=1), None)


@row("E15")
@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.DECODER])
def test_finalize_again_and_init_again(new_datadist, role):
    side = new_datadist(role)
    side.finalize()
    side.init(options(listen="127.0.0.1:0"))
    first = side.kv_cache_manager
    assert side.kv_cache_manager is first
    view = first.get_cache_tensors(first.allocate_cache(byte_desc()))[0].torch()
    side.finalize()
    side.finalize()
    assert not first.is_initialized()
    view.fill_(7)  # memory that is still there
    side.init(options(listen="127.0.0.1:0"))
    second = side.kv_cache_manager
    assert second.is_initialized()
    assert not first.is_initialized()
    assert second.allocate_cache(byte_desc()).cache_id == 1


@row("E15")
def test_finalize_leaves_no_thread_and_no_listener():
    before = set(threading.enumerate())
    prompt, decoder = start_prompt(), start_decoder()
    port = prompt.listen_port
    decoder.link_clusters([cluster_info(1, port)], PATIENT)
    decoder.finalize()
    prompt.finalize()
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


FORGOTTEN = """
import sys
sys.path[:] = sys.argv[1:]
from sides import *
prompt, decoder = start_prompt(), start_decoder()
decoder.link_clusters([cluster_info(1, prompt.listen_port)], PATIENT)
decoder.kv_cache_manager.allocate_cache(byte_desc())
print("linked", flush=True)
"""


@row("E15")
def test_a_program_that_forgets_to_finalize_ends_all_the_same():
    done = subprocesses.run([sys.executable, "-c", FORGOTTEN, *sys.path], preload=True)
    assert (done.returncode, done.stdout) == (0, "linked\n"), done.stderr


@row("E16")
def test_both_roles_in_one_process_count_their_caches_from_one(prompt, decoder):
    for manager in (prompt.kv_cache_manager, decoder.kv_cache_manager):
        ids = [
            manager.allocate_cache(byte_desc()).cache_id,
            manager.allocate_blocks_cache(byte_desc()).cache_id,
        ]
        assert ids == [1, 2]


@row("E16")
def test_two_objects_of_one_role_do_not_share_anything():
    sides = [start_prompt(1, pool=1000), start_prompt(1, pool=1000)]
    try:
        caches = [
            side.kv_cache_manager.allocate_cache(byte_desc(1, 1000, 1), [CacheKey(1, 5)]) for side in sides
        ]
        assert caches[0].per_device_tensor_addrs != caches[1].per_device_tensor_addrs
    finally:
        for side in sides:
            side.finalize()
