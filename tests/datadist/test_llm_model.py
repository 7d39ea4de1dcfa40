"""Models: prefill by `predict`, KV pulled and merged by request, prefixes and paged models."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from conformance import row
from failing import fails_with
from model_pairs import (
    CACHE_BYTES,
    DESC,
    PREFIX,
    Models,
    add_runner_model,
    model_options,
    request,
    staged_and_merged,
)
from pair_checks import free_on_prompt
from sides import POOL, Runner, byte_desc, num_free_bytes, pattern, read_cache

from quire.datadist import (
    CacheKey,
    KvCache,
    LLMException,
    LLMReq,
    LLMStatusCode,
    ModelRunner,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
REPEAT = LLMStatusCode.LLM_REPEAT_REQUEST
OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


@row("E65", "LLMModel")
def test_requests_of_a_prefill(models):
    pair, prefill = models.pair, models.prefill
    assert prefill.predict([request(5)], 1, answer="first") == "first"
    assert prefill.predict(request(6), 2) is None
    assert prefill.predict((LLMReq(), request(7)), 3) is None
    free = free_on_prompt(pair)
    for requests, code in (
        ([request(10), request(11), LLMReq()], INVALID),
        ([request(10), request(10)], REPEAT),
        ([request(10), request(6)], REPEAT),
        (request(7), REPEAT),
    ):
        with fails_with(code):
            prefill.predict(requests, 4)
    assert free_on_prompt(pair) == free
    for req_id, seed, slot in ((7, 3, 1), (5, 1, 0), (6, 2, 0)):
        models.decode.pull_kv(request(req_id))
        models.decode.merge_kv(request(req_id), 0)
        models.assert_slot(0, pattern(DESC, seed)[:, slot])
    with fails_with(NOT_EXIST):
        models.decode.pull_kv(request(10))
    assert free_on_prompt(pair) == POOL


@row("E65")
def test_no_requests_and_what_are_none(models):
    with pytest.raises((ValueError, LLMException)):
        models.prefill.predict([], 1)
    for requests in (None, [None], 5):
        with pytest.raises(TypeError):
            models.prefill.predict(requests, 1)


@row("E65")
def test_a_warm_up_keeps_nothing(prompt):
    model, runner = add_runner_model(prompt, model_options())
    assert model.predict([LLMReq(), LLMReq()], 1, answer=7) == 7
    assert model.predict(LLMReq(), 1) is None
    assert len(runner.seen) == 2
    assert num_free_bytes(prompt.kv_cache_manager) == POOL


@row("E65")
def test_a_prefill_that_does_not_fit(prompt):
    model, runner = add_runner_model(prompt, model_options())
    manager = prompt.kv_cache_manager
    rest = manager.allocate_cache(byte_desc(1, POOL - CACHE_BYTES + 1, 1))
    with fails_with(OUT_OF_MEMORY):
        model.predict(request(5), 1)
    assert runner.seen == []
    manager.deallocate_cache(rest)
    model.predict(request(5), 1)


@row("E66")
def test_a_key_is_not_there_while_the_model_runs(make_pair):
    pair = make_pair()
    with socket.create_server(("127.0.0.1", 0)) as gate:
        models = Models(pair, gate=gate.getsockname()[1])
        running = threading.Thread(target=models.prefill.predict, args=(request(5), 1))
        running.start()
        connection, _ = gate.accept()
        with connection, fails_with(NOT_EXIST):
            models.decode.pull_kv(request(5))
        running.join()
    models.decode.pull_kv(request(5))
    models.decode.merge_kv(request(5), 1)
    models.assert_slot(1, pattern(DESC, 1)[:, 0])


@row("E66")
def test_a_model_that_raises_leaves_nothing(models):
    pair = models.pair
    with pytest.raises(ValueError, match="it is too hot"):
        models.prefill.predict(request(5), 1, error="it is too hot")
    assert free_on_prompt(pair) == POOL
    with fails_with(NOT_EXIST):
        models.decode.pull_kv(request(5))
    models.prefill.predict(request(5), 2)
    models.decode.pull_kv(request(5))


@row("E67")
@pytest.mark.parametrize("role", ["prompt", "decoder"])
def test_inputs_and_results_pass_unchanged(role, prompt, decoder):
    side = {"prompt": prompt, "decoder": decoder}[role]
    given, result = object(), object()

    class Passing(ModelRunner):
        def run_model(self, kv_cache, input_tensors, **kwargs):
            self.arguments = kv_cache, input_tensors, kwargs
            return result

    runner = Passing()
    model = side.add_model(model_options(), runner)
    assert model.predict([LLMReq(), LLMReq()], given, inputs_too=given, temperature=2) is result
    cache, inputs, keywords = runner.arguments
    assert isinstance(cache, KvCache)
    assert inputs is given
    assert keywords == {"inputs_too": given, "temperature": 2}


@row("E68")
def test_the_slots_of_a_decoder(models):
    decode = models.decode
    first = staged_and_merged(models, 5, 1, seed=1)
    assert decode.predict([LLMReq(), first], None, answer=1) == 1
    assert decode.predict([LLMReq(), LLMReq()], None, answer=2) == 2  # it sits out a step
    for requests in ([first], [first, LLMReq()], [LLMReq(), first, LLMReq()], [LLMReq(), request(6)], first):
        with fails_with(INVALID):
            decode.predict(requests, None)
    assert len(models.runner.seen) == 2
    second = staged_and_merged(models, 6, 0, seed=2)
    assert decode.predict((second, first), None, answer=3) == 3
    with fails_with(INVALID):
        decode.predict([first, second], None)
    models.assert_slot(1, pattern(DESC, 1)[:, 0])
    models.assert_slot(0, pattern(DESC, 2)[:, 0])


@row("E68")
def test_merging_into_a_slot_replaces_its_request(models):
    first = staged_and_merged(models, 5, 0, seed=1)
    second = staged_and_merged(models, 6, 0, seed=2)
    with fails_with(INVALID):
        models.decode.predict([first, LLMReq()], None)
    models.decode.predict([second, LLMReq()], None)
    models.assert_slot(0, pattern(DESC, 2)[:, 0])


@row("E69")
def test_bad_merges(models):
    decode, first, second = models.decode, request(5), request(6)
    with fails_with(NOT_EXIST):
        decode.merge_kv(first, 0)
    models.prefill.predict([first, second], 1)
    decode.pull_kv(first)
    with fails_with(NOT_EXIST):
        decode.merge_kv(second, 0)
    for arguments in ((first, 2), (first, 0, 1), (first, 2**32 - 1)):
        with fails_with(INVALID):
            decode.merge_kv(*arguments)
    for arguments, error in (
        ((first, -1), ValueError),
        ((first, True), TypeError),
        ((first, 0, -1), ValueError),
    ):
        with pytest.raises(error):
            decode.merge_kv(*arguments)
    assert not models.cache_of_decoder().any()
    decode.merge_kv(first, 1, batch_id=0)
    with fails_with(NOT_EXIST):
        decode.merge_kv(first, 0)
    models.assert_slot(1, pattern(DESC, 1)[:, 0])
    models.assert_slot(0, np.zeros((4, 32), np.uint8))


@row("E70")
def test_a_second_pull_replaces_what_is_staged(models):
    first, second = request(5), request(6)
    models.prefill.predict([first, second], 1)
    models.decode.pull_kv(first)
    models.decode.pull_kv(second)
    with fails_with(NOT_EXIST):
        models.decode.merge_kv(first, 0)
    models.decode.merge_kv(second, 0)
    models.assert_slot(0, pattern(DESC, 1)[:, 1])
    with fails_with(NOT_EXIST):
        models.decode.pull_kv(first)  # it has been pulled whole


@row("E70")
def test_what_cannot_be_pulled_by_request(models):
    prefilled = request(5)
    models.prefill.predict(prefilled, 1)
    for req, code in (
        (LLMReq(), INVALID),
        (LLMReq(prompt_cluster_id=1, prefix_id=5), INVALID),
        (LLMReq(req_id=5, prompt_cluster_id=77), LLMStatusCode.LLM_NOT_YET_LINK),
        (request(6), NOT_EXIST),
    ):
        with fails_with(code):
            models.decode.pull_kv(req)
    models.decode.pull_kv(LLMReq(req_id=5, prompt_cluster_id=1, prefix_id=99))  # the prefix does not matter
    models.decode.merge_kv(prefilled, 0)


@row("E71")
def test_complete_requests_on_a_prompt(models):
    pair = models.pair
    models.prefill.predict([request(5), request(6)], 1)
    for req in (request(99), LLMReq()):
        pair.prompt.complete_request(req)
    assert free_on_prompt(pair) == POOL - CACHE_BYTES
    pair.prompt.complete_request(request(5))
    with fails_with(NOT_EXIST):
        models.decode.pull_kv(request(5))
    models.decode.pull_kv(request(6))
    assert free_on_prompt(pair) == POOL
    pair.prompt.complete_request(request(6))
    models.prefill.predict(request(5), 2)
    models.decode.pull_kv(request(5))


@row("E71")
def test_complete_requests_on_a_decoder(models):
    pair = models.pair
    merged = staged_and_merged(models, 5, 0, seed=1)
    models.prefill.predict(request(6), 2)
    models.decode.pull_kv(request(6))
    for req in (request(99), LLMReq(), merged, merged, request(6)):
        pair.decoder.complete_request(req)
    with fails_with(INVALID):
        models.decode.predict([merged, LLMReq()], None)
    models.decode.predict([LLMReq(), LLMReq()], None)
    with fails_with(NOT_EXIST):
        models.decode.merge_kv(request(6), 0)


@row("E71")
def test_a_request_is_completed_in_every_model(pair):
    models = [Models(pair), Models(pair)]
    for one in models:
        one.prefill.predict(request(5), 1)
    pair.prompt.complete_request(request(5))
    for one in models:
        with fails_with(NOT_EXIST):
            one.decode.pull_kv(request(5))
    assert free_on_prompt(pair) == POOL


@row("E74")
def test_methods_of_the_other_role(prompt, decoder):
    options = model_options(enable_shared_system_prefix=True)
    prefill, decode = (side.add_model(options, Runner(side)) for side in (prompt, decoder))
    for call in (
        lambda: prefill.pull_kv(request(5)),
        lambda: prefill.merge_kv(request(5), 0),
        lambda: prefill.pull_blocks(request(5), [0], [0]),
        lambda: decode.preload_prompt_prefix(PREFIX, 1),
        lambda: decode.release_prompt_prefix(PREFIX),
    ):
        with fails_with(INVALID):
            call()


@row("E75", "LLMReq")
def test_a_prompt_that_is_too_long(prompt):
    model, runner = add_runner_model(prompt, model_options("2,16,8", kv_seq_len_dim_index=1))
    with fails_with(LLMStatusCode.LLM_SEQ_LEN_OVER_LIMIT):
        model.predict([request(5, prompt_length=16), request(6, prompt_length=17)], 1)
    assert runner.seen == []
    assert num_free_bytes(prompt.kv_cache_manager) == POOL
    model.predict([request(5, prompt_length=16)], 1)
    unlimited, _ = add_runner_model(prompt, model_options("2,16,8"))
    unlimited.predict([request(6, prompt_length=17)], 1)


@row("E76")
def test_two_models(pair):
    models = [Models(pair), Models(pair)]
    assert [(one.prefill.model_id, one.decode.model_id) for one in models] == [(0, 0), (1, 1)]
    for number, one in enumerate(models):
        one.prefill.predict(request(5), number + 1)
    models[1].decode.pull_kv(request(5))
    with fails_with(NOT_EXIST):
        models[0].decode.merge_kv(request(5), 0)
    models[0].decode.pull_kv(request(5))
    for number, one in enumerate(models):
        one.decode.merge_kv(request(5), number)
        one.assert_slot(number, pattern(DESC, number + 1)[:, 0])
        one.assert_slot(1 - number, np.zeros((4, 32), np.uint8))


@row("E76")
def test_a_model_finds_its_keys_among_those_of_the_manager(pair):
    models = Models(pair)
    models.prefill.predict(request(5), 1)
    with fails_with(REPEAT):
        pair.pm.allocate_cache(byte_desc(1, 32), [CacheKey(1, 5)])
    target = pair.dm.allocate_cache(byte_desc(1, 32))
    pair.dm.pull_cache(CacheKey(1, 5), target)
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 0], pattern(DESC, 1)[:, 0])
    with fails_with(NOT_EXIST):
        models.decode.pull_kv(request(5))


@row("E77")
def test_a_request_id_is_free_as_soon_as_its_pull_has_returned(models):
    for seed in range(10):
        models.prefill.predict(request(5), seed)
        models.decode.pull_kv(request(5))
    models.decode.merge_kv(request(5), 0)
    models.assert_slot(0, pattern(DESC, 9)[:, 0])
