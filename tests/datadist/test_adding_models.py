"""Models as they are added and finalized: what they need, their hooks and their memory."""

from __future__ import annotations

import pytest
import sides
from conformance import row
from failing import fails_with
from model_pairs import (
    CACHE_BYTES,
    add_runner_model,
    model_options,
    request,
)
from remote_objects import remote_process
from sides import POOL, Runner, num_free_bytes, read_cache

from quire.datadist import (
    KvCache,
    LLMStatusCode,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


@row("E63", "ModelConfig")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"llm.RefInputShapes": "2,32"},
        {"llm.RefInputDtypes": "4"},
        {"llm.RefInputShapes": "2,32;2,16", "llm.RefInputDtypes": "4;4"},
        {"llm.RefInputShapes": "2,32;2,32", "llm.RefInputDtypes": "4;2"},
        {"llm.RefInputShapes": "2,32;2,32", "llm.RefInputDtypes": "4"},
        {"llm.RefInputShapes": "2,0;2,0", "llm.RefInputDtypes": "4;4"},
        {"llm.RefInputShapes": "2,x", "llm.RefInputDtypes": "4"},
        {"llm.RefInputShapes": "2,32", "llm.RefInputDtypes": "5"},
    ],
)
def test_a_model_that_has_no_clear_shape(prompt, decoder, options):
    for side in (prompt, decoder):
        with fails_with(INVALID):
            side.add_model(options, Runner(side))
        assert num_free_bytes(side.kv_cache_manager) == POOL
        assert side.add_model(model_options(), Runner(side)).model_id == 0


@row("E63")
def test_a_model_without_a_runner(prompt, decoder):
    for side in (prompt, decoder):
        with fails_with(NOT_ENABLED):
            side.add_model(model_options())
        with fails_with(NOT_ENABLED):
            side.add_model(model_options(), None)
        assert num_free_bytes(side.kv_cache_manager) == POOL


@row("E63", "set_default_runner_factory")
def test_a_default_runner():
    with remote_process() as process:  # the factory would stay for the tests after this one
        process.call(sides.check_default_runner, model_options(om_paths=["model.om"]))


@row("E64", "ModelRunner")
def test_the_hooks_fire_on_a_decoder(decoder):
    class Checking(Runner):
        def on_cache_allocated(self, kv_cache: KvCache) -> None:
            super().on_cache_allocated(kv_cache)
            self.addresses = kv_cache.per_device_tensor_addrs[0]

        def on_cache_deallocated(self, kv_cache: KvCache) -> None:
            super().on_cache_deallocated(kv_cache)
            with fails_with(NOT_EXIST):
                _ = kv_cache.per_device_tensor_addrs
            self.was_released = True

    runner, manager = Checking(decoder), decoder.kv_cache_manager
    decoder.add_model(model_options(), runner)
    (cache,) = runner.allocated
    views = [manager.get_cache_tensors(cache, index)[0].torch() for index in range(4)]
    assert [view.data_ptr() for view in views] == runner.addresses
    assert not read_cache(manager, cache).any()
    assert num_free_bytes(manager) == POOL - CACHE_BYTES * 3 // 2  # and a slot to stage in
    assert runner.deallocated == []
    decoder.finalize()
    assert [one.cache_id for one in runner.deallocated] == [cache.cache_id]
    assert runner.was_released


@row("E64")
@pytest.mark.parametrize("is_paged", [False, True])
def test_the_hooks_do_not_fire_on_a_prompt(prompt, is_paged):
    model, runner = add_runner_model(prompt, model_options(enable_page_attention=is_paged))
    assert num_free_bytes(prompt.kv_cache_manager) == POOL - CACHE_BYTES * is_paged
    model.predict(request(5), 1)
    prompt.finalize()
    assert (runner.allocated, runner.deallocated) == ([], [])
    assert len(runner.seen) == 1


@row("E64")
def test_a_hook_that_raises(decoder, make_failing):
    manager = decoder.kv_cache_manager
    with pytest.raises(ZeroDivisionError):
        decoder.add_model(model_options(), make_failing("on_cache_allocated"))
    assert num_free_bytes(manager) == POOL
    last = Runner(decoder)
    assert decoder.add_model(model_options(), make_failing("on_cache_deallocated")).model_id == 0
    assert decoder.add_model(model_options(), last).model_id == 1
    decoder.finalize()
    assert len(last.deallocated) == 1
    assert not manager.is_initialized()


@pytest.fixture
def make_failing(decoder):
    def make(name: str) -> Runner:
        runner = Runner(decoder)
        setattr(runner, name, lambda kv_cache: 1 // 0)
        return runner

    return make


@row("E64")
def test_the_cache_of_a_model_is_not_the_users(decoder):
    manager = decoder.kv_cache_manager
    for is_paged in (False, True):
        runner = Runner(decoder)
        decoder.add_model(model_options(enable_page_attention=is_paged), runner)
        with fails_with(INVALID):
            manager.deallocate_cache(runner.allocated[0])
        assert not read_cache(manager, runner.allocated[0]).any()


@row("E64")
def test_a_model_that_does_not_fit(decoder):
    manager = decoder.kv_cache_manager
    runner = Runner(decoder)
    with fails_with(OUT_OF_MEMORY):  # the cache fits, the slot to stage in does not
        decoder.add_model(model_options(f"4,{POOL // 16}"), runner)
    assert num_free_bytes(manager) == POOL
    assert decoder.add_model(model_options(), runner).model_id == 0
