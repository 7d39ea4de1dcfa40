"""The in-memory connector: the contract in every mode, and what it adds to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from connector_contract import BLOCK, PROMPT, ConnectorContract, Engine, kv_of, plan_of, request_of
from hypothesis import given
from hypothesis import strategies as st

from caches import make_cache
from faulty_connector import FaultyConnector
from held import num_held
from memory_connector import HostBlocks
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.blocks.prompt_blocks import PromptBlocks
from quire.kv.connectors.host_blocks import TensorBlocks
from quire.status import RequestStatus
from subprocesses import python_output


class MemoryContract(ConnectorContract):
    def fail_next_load(self, connector):
        connector.fail_next_loads(1)


class TestSynchronous(MemoryContract):
    def make(self):
        return FaultyConnector(BLOCK)


class TestAsynchronous(MemoryContract):
    def make(self):
        return FaultyConnector(BLOCK, load_steps=3)


class TestSending(MemoryContract):
    def make(self):
        return FaultyConnector(BLOCK, load_steps=1, send_steps=2)


class TestPartialFailures(MemoryContract):
    def make(self):
        return FaultyConnector(BLOCK)

    def fail_next_load(self, connector):
        connector.fail_next_loads(1, num_good_blocks=1)


def with_prompt(**options) -> Engine:
    engine = Engine(FaultyConnector(BLOCK, **options))
    engine.compute(request_of("first", PROMPT), [3, 1, 4, 9])
    return engine


def test_a_load_takes_as_many_steps_as_it_was_told():
    engine = with_prompt(load_steps=3)
    request = request_of("again", PROMPT)
    count, is_async = engine.connector.get_num_new_matched_tokens(request, 0)
    assert (count, is_async) == (12, True)
    engine.connector.update_state_after_alloc(request, [20, 21, 22, 23], count)
    assert [sorted(engine.step()[1]) for _ in range(4)] == [[], [], ["again"], []]


def test_a_silent_load_ends_when_it_is_answered():
    engine = with_prompt(load_steps=1)
    engine.connector.never_answer_next_loads(1)
    request = request_of("again", PROMPT)
    engine.connector.get_num_new_matched_tokens(request, 0)
    engine.connector.update_state_after_alloc(request, [20, 21, 22, 23], 12)
    assert not any(engine.step()[1] for _ in range(30))
    engine.connector.answer()
    assert engine.step()[1] == {"again"}
    assert engine.loaded([20, 21, 22], 12).tolist() == kv_of(PROMPT)[:12].tolist()


def test_the_blocks_before_a_failure_are_good():
    engine = with_prompt()
    engine.connector.fail_next_loads(1, num_good_blocks=2)
    engine.load(request_of("again", PROMPT), [20, 21, 22, 23])
    assert engine.failed == {22}
    assert engine.loaded([20, 21], 8).tolist() == kv_of(PROMPT)[:8].tolist()


def test_a_live_peer_renews_and_a_dead_one_does_not():
    engine = with_prompt(send_steps=3)
    request = request_of("sent", PROMPT)
    engine.compute(request, [20, 21, 22, 23])
    delays_free, params = engine.finish(request, [20, 21, 22, 23])
    assert (delays_free, params) == (True, {"request_id": "sent", "block_ids": [20, 21, 22, 23]})
    assert not engine.step()[0]
    assert engine.connector.leases_renewed() == {"sent"}
    engine.connector.is_peer_alive = False
    assert engine.connector.leases_renewed() == frozenset()
    assert not any(engine.step()[0] for _ in range(30))


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_what_did_not_end_well_is_not_sent(status):
    engine = with_prompt(send_steps=3)
    assert engine.finish(request_of("first", PROMPT), [3, 1, 4, 9], status) == (False, None)


def test_nothing_is_kept_of_requests_that_have_ended():
    engine = with_prompt(load_steps=1, send_steps=1)
    engine.finish(request_of("first", PROMPT), [3, 1, 4, 9])
    held = num_held(engine.connector)
    for number in range(50):
        request = request_of(f"request-{number}", PROMPT)
        engine.load(request, [20, 21, 22, 23])
        engine.step(request, [20, 21, 22, 23], computed=12, tokens=1)
        engine.finish(request, [20, 21, 22, 23])
    engine.step()
    assert num_held(engine.connector) <= held + 40


class Content:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 40)), max_size=60))
def test_host_blocks_are_bounded_and_drop_the_least_recently_used(operations):
    keys = SequenceKeys(root_digest(), 1)
    keys.extend(np.arange(8, dtype=np.int32))
    store, naive = HostBlocks(100), []
    for is_put, index, size in operations:
        if is_put:
            store.put(keys[index], Content(size))
            if index not in [item[0] for item in naive]:
                naive.append((index, size))
            while sum(item[1] for item in naive) > 100:
                naive.pop(0)
        elif store.get(keys[index]) is not None:
            naive.append(naive.pop([item[0] for item in naive].index(index)))
        assert {index for index in range(8) if keys[index] in store} == {item[0] for item in naive}
        assert store.num_bytes == sum(item[1] for item in naive) <= 100


def test_a_block_larger_than_the_store_is_not_kept():
    keys = SequenceKeys(root_digest(), 1)
    keys.extend(np.arange(1, dtype=np.int32))
    store = HostBlocks(10)
    store.put(keys[0], Content(11))
    assert (len(store), store.num_bytes) == (0, 0)


def test_tensors_are_copied_block_by_block():
    cache = make_cache(
        num_blocks=4, num_layers=2, num_kv_heads=1, block_size=BLOCK, head_dim=8, dtype=torch.bfloat16
    )
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    blocks = TensorBlocks(cache)
    content = np.empty(cache.bytes_per_block, dtype=np.uint8)
    blocks.read_block(1, content)
    before = cache.tensor.clone()
    cache.tensor[1] = 0
    blocks.write_block(3, content)
    assert torch.equal(cache.tensor[3], before[1])
    assert torch.equal(cache.tensor[2], before[2])


def test_the_logical_side_imports_no_torch():
    modules = "quire.kv.connectors.host_blocks, quire.kv.blocks.leases, quire.kv.blocks.events"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert python_output(code) == "False\n"


def test_kv_is_not_loaded_before_there_is_a_cache():
    connector = FaultyConnector(BLOCK)
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        connector.wait_for_save(frozenset())


def test_a_step_has_read_the_block_in_the_middle_of_which_it_began():
    """What it completes of a block whose beginning could not be loaded is not to be kept."""
    request = request_of("again", PROMPT)
    keys = SequenceKeys(root_digest(), BLOCK)
    keys.end_with(request.prompt_array[:-1])
    for computed, read in ((12, [20, 21, 22]), (13, [20, 21, 22, 23])):
        plan = plan_of(0, request, [20, 21, 22, 23], computed, 14 - computed, new=True)
        [save] = PromptBlocks(BLOCK).completed_by(plan, {"again": keys})
        assert [block_id for _, (block_id,) in save.blocks] == [20, 21, 22, 23]
        assert save.trusted_block_ids == read
