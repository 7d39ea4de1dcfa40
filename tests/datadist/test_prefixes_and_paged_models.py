"""Models whose KV is shared: prefixes, and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from model_pairs import (
    CACHE_BYTES,
    PREFIX,
    Models,
    add_runner_model,
    model_options,
    request,
)
from pair_checks import free_on_prompt
from sides import POOL, Runner, byte_desc, num_free_bytes, pattern, read_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheKey,
    LLMReq,
    LLMStatusCode,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@row("E72")
def test_a_prefix_is_in_the_slot_before_the_model_runs(prompt):
    model, runner = add_runner_model(prompt, model_options(enable_shared_system_prefix=True))
    manager = prompt.kv_cache_manager
    assert model.preload_prompt_prefix(PREFIX, 1, answer="dropped") is None
    one_slot = byte_desc(1, 32)
    assert num_free_bytes(manager) == POOL - one_slot.num_tensors * one_slot.tensor_bytes
    with fails_with(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST):
        model.preload_prompt_prefix(PREFIX, 2)
    model.predict([request(5), request(6, prefix_id=9)], 3)
    assert runner.seen[0].shape == (4, 1, 32)
    expected = np.zeros((4, 2, 32), np.uint8)
    expected[:, 1] = pattern(one_slot, 1)[:, 0]
    np.testing.assert_array_equal(runner.seen[-1], expected)
    model.release_prompt_prefix(PREFIX)
    assert num_free_bytes(manager) == POOL - CACHE_BYTES
    with fails_with(LLMStatusCode.LLM_PREFIX_NOT_EXIST):
        model.release_prompt_prefix(PREFIX)
    with fails_with(LLMStatusCode.LLM_PREFIX_NOT_EXIST):
        model.predict(request(7, prefix_id=9), 4)
    assert num_free_bytes(manager) == POOL - CACHE_BYTES
    model.preload_prompt_prefix(PREFIX, 5)
    prompt.complete_request(request(5))
    prompt.complete_request(request(6))
    model.release_prompt_prefix(PREFIX)
    assert num_free_bytes(manager) == POOL


@row("E72")
def test_a_prefix_is_pulled_by_its_key(pair):
    models = Models(pair, enable_shared_system_prefix=True)
    models.prefill.preload_prompt_prefix(PREFIX, 1)
    target = pair.dm.allocate_cache(byte_desc(1, 32))
    for _ in range(2):
        pair.dm.pull_cache(CacheKey(1, 2**64 - 1, prefix_id=9), target)
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(byte_desc(1, 32), 1))


@row("E72")
def test_prefixes_that_fail(prompt):
    model, runner = add_runner_model(prompt, model_options(enable_shared_system_prefix=True))
    plain, _ = add_runner_model(prompt, model_options())
    paged, _ = add_runner_model(
        prompt, model_options(enable_shared_system_prefix=True, enable_page_attention=True)
    )
    manager = prompt.kv_cache_manager
    free = num_free_bytes(manager)
    for call, code in (
        (lambda: plain.preload_prompt_prefix(PREFIX, 1), NOT_ENABLED),
        (lambda: plain.predict(request(5, prefix_id=9), 1), NOT_ENABLED),
        (lambda: model.preload_prompt_prefix(LLMReq(), 1), INVALID),
        (lambda: paged.preload_prompt_prefix(PREFIX, 1), INVALID),
    ):
        with fails_with(code):
            call()
    with pytest.raises(ValueError, match="cold"):
        model.preload_prompt_prefix(PREFIX, 1, error="cold")
    assert num_free_bytes(manager) == free
    with fails_with(LLMStatusCode.LLM_PREFIX_NOT_EXIST):
        model.release_prompt_prefix(PREFIX)
    assert len(runner.seen) == 1


@row("E73")
def test_blocks_between_paged_models(pair):
    desc = byte_desc(4, 32)
    models = Models(pair, shape="4,32", enable_page_attention=True)
    models.prefill.predict([request(number) for number in range(5)], 1)  # as many as one likes
    expected = np.zeros((4, 4, 32), np.uint8)
    for _ in range(2):
        models.decode.pull_blocks(request(0), [3, 1], [0, 2])
        expected[:, [0, 2]] = pattern(desc, 1)[:, [3, 1]]
        np.testing.assert_array_equal(models.cache_of_decoder(), expected)
    target = pair.dm.allocate_blocks_cache(desc)
    pair.dm.pull_blocks(BlocksCacheKey(1, 0), target, [2], [2])
    np.testing.assert_array_equal(read_cache(pair.dm, target)[:, 2], pattern(desc, 1)[:, 2])
    for prompt_blocks, decoder_blocks in (([0, 1], [0]), ([4], [0]), ([0], [4]), ([0, 1], [2, 2])):
        with fails_with(INVALID):
            models.decode.pull_blocks(request(0), prompt_blocks, decoder_blocks)
    with fails_with(INVALID):
        models.decode.pull_kv(request(0))
    with fails_with(INVALID):
        models.decode.merge_kv(request(0), 0)
    pair.prompt.complete_request(request(0))
    models.decode.predict([request(5)] * 6, None)
    np.testing.assert_array_equal(models.cache_of_decoder(), expected)


@row("E73")
def test_a_slot_is_spread_over_blocks(pair):
    prefill = pair.call(sides.add_model, pair.prompt, model_options("2,96"))
    runner = Runner(pair.decoder)
    decode = pair.decoder.add_model(model_options("5,32", enable_page_attention=True), runner)
    prefill.predict([LLMReq(), request(6)], 1)
    slot = pattern(byte_desc(2, 96), 1)[:, 1]
    expected = np.zeros((4, 5, 32), np.uint8)
    for blocks in ([4, 0, 2], [1, 3]):
        decode.pull_blocks(request(6), [], blocks)
        for index, block in enumerate(blocks):
            expected[:, block] = slot[:, index * 32 : (index + 1) * 32]
        np.testing.assert_array_equal(read_cache(pair.dm, runner.allocated[0]), expected)
    for blocks, code in (([0, 1, 2, 3], INVALID), ([0, 5], INVALID), ([1, 1], INVALID)):
        with fails_with(code):
            decode.pull_blocks(request(6), decoder_blocks=blocks)
    with fails_with(NOT_EXIST):
        decode.pull_blocks(request(7), [], [0])
    np.testing.assert_array_equal(read_cache(pair.dm, runner.allocated[0]), expected)
    assert free_on_prompt(pair) < POOL  # the key is kept
    pair.prompt.complete_request(request(6))
    assert free_on_prompt(pair) == POOL


@row("E73")
def test_blocks_need_a_paged_model(models):
    models.prefill.predict(request(5), 1)
    with fails_with(NOT_ENABLED):
        models.decode.pull_blocks(request(5), [], [0])
    models.decode.pull_kv(request(5))
