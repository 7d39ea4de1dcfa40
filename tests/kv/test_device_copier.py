"""KV tiers of a cache in a device's memory, whose steps and copies are done late and in any permitted order.

Steps are operations of the device like its copies: they write a block's KV, or compare it with what it has to
be, when the device gets to them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from connector_contract import BLOCK, NUM_BLOCKS, PROMPT, ConnectorContract, kv_of, plan_of, request_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inline_threads import InlineThreads
from insides import always_load, copier_of
from late_device import DeviceError, LateDevice
from quire.kv.blocks.groups import NULL_BLOCK
from quire.kv.connectors.host_blocks import TensorBlocks
from quire.kv.tiers import block_copier
from quire.kv.tiers.block_copier import BlockCopier, HostCopier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.device_copier import DeviceCopier, SlotRing
from quire.kv.tiers.tier import MemoryTier

BLOCKS = [20, 21, 22, 23]
NUM_SLOTS = 5
NUM_READERS = 1


class DeviceBench:
    """A tier behind a cache of one float64 for each token, whose threads run when they are told to."""

    def __init__(self, *, num_blocks: int = NUM_BLOCKS, is_eager: bool = False) -> None:
        self.device = LateDevice(is_eager=is_eager)
        self.cache = torch.full((num_blocks, BLOCK), -1.0, dtype=torch.float64)
        self.readers, self.writer = InlineThreads(), InlineThreads()
        self.connector = TierConnector(
            BLOCK,
            lambda num_bytes: MemoryTier(1 << 20, num_bytes, min_uses=1),
            readers=self.readers,
            writer=self.writer,
            copier_of=lambda caches, _: DeviceCopier(caches, self.device),
        )
        always_load(self.connector)
        self.connector.register_kv_caches([self.cache])
        self.copier: DeviceCopier = copier_of(self.connector)
        self.num_steps = 0
        self.received: set[str] = set()
        self.failed: set[int] = set()
        self.wrong: list[str] = []

    def step(
        self, request=None, blocks=(), *, tokens=0, compute=lambda: None, failed_ids=frozenset
    ) -> frozenset[str]:
        """Plan a step, ask the device for it, and return the loads that have ended."""
        plan = plan_of(self.num_steps, request, blocks, 0, tokens, new=True)
        self.num_steps += 1
        self.connector.start_load_kv(self.connector.build_connector_meta(plan))
        compute()
        self.connector.begin_save(failed_ids)
        received = self.connector.get_finished(())[1]
        self.received |= received
        self.failed |= self.connector.get_block_ids_with_load_errors()
        return received

    def write(self, blocks, values) -> None:
        """Have a step write values to blocks, place by place."""
        padded = torch.from_numpy(np.pad(values, (0, -len(values) % BLOCK), constant_values=-2.0))
        index = torch.tensor(list(blocks)[: len(padded) // BLOCK])
        self.device.steps.ask(lambda: self.cache.index_copy_(0, index, padded.view(-1, BLOCK)))

    def expect(self, blocks, values) -> None:
        """Have a step compare blocks with values."""
        expected = values[: len(values) // BLOCK * BLOCK].tolist()
        if not expected:
            return
        index = torch.tensor(list(blocks)[: len(expected) // BLOCK])

        def compare() -> None:
            found = self.cache[index].view(-1).tolist()
            if found != expected:
                self.wrong.append(f"blocks {index.tolist()} are {found}, and not {expected}")

        self.device.steps.ask(compare)

    def compute(self, tokens=PROMPT, blocks=(3, 1, 4, 9), name="first", failed_ids=frozenset) -> None:
        """Ask for a step that computes a prompt, and end the request."""
        request = request_of(name, tokens)
        self.connector.get_num_new_matched_tokens(request, 0)
        self.connector.update_state_after_alloc(request, np.array([blocks]), 0)
        compute = functools.partial(self.write, blocks, kv_of(tokens))
        self.step(request, blocks, tokens=len(tokens), compute=compute, failed_ids=failed_ids)
        self.connector.request_finished(request, blocks)

    def begin_load(self, tokens=PROMPT, blocks=BLOCKS, name="again") -> int:
        """Begin a load with a step; return the number of tokens, 0: there is nothing."""
        request = request_of(name, tokens)
        count, _ = self.connector.get_num_new_matched_tokens(request, 0)
        self.connector.update_state_after_alloc(request, np.array([blocks]), count)
        if count:
            self.step()
        else:
            self.connector.request_finished(request, ())
        return count

    def end(self) -> None:
        """Let everything that was asked for end, and check it."""
        self.readers.run_held()
        self.writer.run_held()
        self.device.finish()
        assert not self.wrong
        assert self.copier.slots.num_free == block_copier.num_staged_blocks(BLOCK * 8)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", NUM_SLOTS * BLOCK * 8)


class TestDevice(ConnectorContract):
    def make(self):
        def copier_of(caches, _):
            return DeviceCopier([torch.from_numpy(caches[0].blocks)], LateDevice(is_eager=True))

        return TierConnector(
            BLOCK,
            lambda num_bytes: MemoryTier(1 << 20, num_bytes, min_uses=1),
            readers=InlineThreads(),
            writer=InlineThreads(),
            copier_of=copier_of,
        )

    def fail_next_load(self, connector):
        copier_of(connector)._device.failing["wait"] = 1


# -- order with the steps ----------------------------------------------------------------------------------


def test_nobody_waits_for_the_device_in_a_step():
    bench = DeviceBench()
    bench.readers.is_held = bench.writer.is_held = True
    bench.device.on_wait = wait = lambda: pytest.fail("the step's thread waits")
    bench.compute(failed_ids=lambda: wait() or frozenset())
    bench.device.on_wait = wait = lambda: None
    bench.writer.is_held = False
    bench.writer.run_held()
    num_done = bench.device.num_done
    bench.device.on_wait = lambda: pytest.fail("the step's thread waits")
    assert bench.begin_load() == 12
    bench.step()
    bench.connector.cancel_load("again")
    bench.step()
    assert bench.device.num_done == num_done


def test_a_block_is_saved_as_its_step_left_it_whatever_overwrites_it_later():
    bench = DeviceBench()
    bench.writer.is_held = True
    bench.compute()
    bench.write([3, 1, 4, 9], np.full(16, 0.5))  # the next owner's step, asked for before anything is done
    while bench.device.run(lambda ready: ready[0]):  # steps first
        pass
    bench.writer.is_held = False
    bench.writer.run_held()
    assert bench.begin_load() == 12
    assert bench.received == {"again"}
    bench.expect(BLOCKS, kv_of(PROMPT))
    bench.end()


def test_staged_blocks_are_not_overwritten_before_they_are_written():
    bench = DeviceBench()
    bench.writer.is_held = True
    others = list(range(50, 64))
    bench.compute()
    bench.compute(others, [5, 6, 7, 8], "second")
    assert bench.connector.stats().num_dropped_writes == 1, "three and two of five slots"
    bench.device.finish()
    bench.writer.run_held(3)  # a refresh, two writes
    bench.compute(list(range(70, 84)), [10, 11, 12, 13], "third")
    assert bench.connector.stats().num_dropped_writes == 2
    bench.writer.is_held = False
    bench.writer.run_held()
    for name, tokens, count in (("a", PROMPT, 12), ("b", others, 8), ("c", list(range(70, 84)), 8)):
        assert bench.begin_load(tokens, name=name) == count
        assert name in bench.received
        bench.expect(BLOCKS, kv_of(tokens)[:count])
    bench.end()


def test_a_load_comes_after_the_steps_that_may_still_use_its_blocks():
    bench = DeviceBench()
    bench.compute()
    bench.readers.is_held = True
    bench.write(BLOCKS, np.full(16, 7.0))  # a step in flight, whose request was aborted
    bench.expect(BLOCKS, np.full(16, 7.0))
    assert bench.begin_load() == 12
    bench.readers.run_held()
    assert bench.step() == {"again"}
    bench.expect(BLOCKS, kv_of(PROMPT))
    bench.end()


def test_a_load_is_not_reported_before_it_has_landed():
    bench = DeviceBench()
    bench.compute()
    bench.readers.is_held = True
    assert bench.begin_load() == 12
    for _ in range(3):
        assert bench.step() == frozenset()
        bench.readers.run_held(1)
    assert bench.step() == {"again"}
    assert torch.equal(bench.cache[BLOCKS[:3]].view(-1), torch.from_numpy(kv_of(PROMPT)[:12]))


def test_blocks_of_a_load_that_is_cancelled_in_mid_copy_are_the_next_owner_s():
    bench = DeviceBench()
    bench.compute()
    bench.readers.is_held = True
    assert bench.begin_load() == 12

    def cancel() -> None:  # while a reader waits for its copy
        bench.device.on_wait = lambda: None
        bench.connector.cancel_load("again")
        bench.step()
        bench.write(BLOCKS, np.full(16, 7.0))
        bench.expect(BLOCKS, np.full(16, 7.0))
        while bench.device.run(lambda ready: ready[0]) and not bench.wrong:  # steps first, copies last
            pass
        bench.expect(BLOCKS, np.full(16, 7.0))

    bench.device.on_wait = cancel
    bench.readers.run_held()
    bench.end()
    assert bench.step() == frozenset()


def test_what_a_step_costs_is_known_once_the_device_has_computed_it():
    bench = DeviceBench()
    prompt = list(range(1, 24))
    bench.writer.is_held = True
    bench.compute(prompt, range(30, 36))
    assert bench.connector.stats().compute_seconds_per_token == 0
    bench.device.finish()
    bench.step()
    assert bench.connector.stats().compute_seconds_per_token > 0


# -- failures ----------------------------------------------------------------------------------------------


def test_blocks_wait_for_the_verdict_of_their_step_and_are_others_by_then():
    bench = DeviceBench()
    bench.writer.is_held = True
    others = list(range(50, 64))
    bench.compute(failed_ids=lambda: frozenset({"first"}))
    bench.compute(others, [4, 9, 3, 1], "second")  # whose step overwrites what the one before has filled
    bench.device.finish()
    bench.writer.is_held = False
    bench.writer.run_held()
    stats = bench.connector.stats()
    assert (stats.num_written_blocks, stats.num_failed_writes, stats.num_dropped_writes) == (2, 0, 1)
    assert bench.begin_load() == 0
    assert bench.begin_load(others, name="third") == 8
    bench.expect(BLOCKS, kv_of(others)[:8])
    bench.compute(name="fourth")  # what has failed is computed and stored as if for the first time
    assert bench.begin_load(blocks=[30, 31, 32, 33], name="fifth") == 12
    bench.expect([30, 31, 32], kv_of(PROMPT))
    bench.end()


@pytest.mark.parametrize("call", ["gather", "copy", "wait"])
def test_a_save_that_fails_loses_its_blocks_and_nothing_else(call, caplog):
    bench = DeviceBench()
    bench.device.failing = {call: 1 if call != "wait" else 3}
    bench.compute()
    stats = bench.connector.stats()
    assert (stats.num_written_blocks, stats.num_failed_writes) == (0, 3)
    bench.compute(name="second")
    assert bench.begin_load() == 12
    assert bench.received == {"again"}
    bench.expect(BLOCKS, kv_of(PROMPT))
    bench.end()


@pytest.mark.parametrize("call", ["pinned", "copy", "wait"])
def test_a_block_that_cannot_be_loaded_fails_alone(call):
    bench = DeviceBench()
    bench.compute()
    bench.device.failing = {call: 1}
    assert bench.begin_load() == 12
    assert bench.received == {"again"}
    assert bench.failed == {20}
    bench.expect(BLOCKS[1:], kv_of(PROMPT)[4:12])
    assert bench.begin_load(blocks=[30, 31, 32, 33], name="third") == 12
    assert "third" in bench.received
    bench.expect([30, 31, 32], kv_of(PROMPT))
    bench.end()


def test_where_the_device_cannot_be_held_the_host_waits(caplog):
    bench = DeviceBench()
    bench.compute()
    copy = bench.copier.copy_in((20,), np.full(BLOCK * 8, 9, dtype=np.uint8), bench.copier.mark())
    bench.device.failing = {"hold": 1}
    copy.hold_steps()
    assert (bench.cache[20].view(torch.uint8) == 9).all()
    bench.device.failing = {"hold": 1, "wait": 1}
    copy.hold_steps()
    assert "could not make the device wait" in caplog.text


def test_a_step_that_the_device_refuses_fails_and_the_next_one_is_as_any():
    bench = DeviceBench()
    bench.device.failing = {"mark": 1}
    with pytest.raises(DeviceError):
        bench.compute()
    bench.compute(name="second")
    assert bench.begin_load() == 12
    assert bench.received == {"again"}
    bench.end()


def test_closing_writes_what_was_copied_and_gives_up_what_is_loaded():
    bench = DeviceBench()
    bench.compute()
    bench.readers.is_held = bench.writer.is_held = True
    assert bench.begin_load() == 12
    bench.compute(list(range(50, 64)), [5, 6, 7, 8], "second")
    bench.readers.close = lambda _: bench.readers.run_held()
    bench.writer.close = lambda _: bench.writer.run_held()
    num_written = bench.connector.stats().num_written_blocks
    bench.connector.close()
    assert bench.connector.stats().num_written_blocks == num_written + 3
    bench.expect(BLOCKS, np.full(16, -1.0))
    bench.end()


# -- slots -------------------------------------------------------------------------------------------------


def test_slots_are_neighbours_and_go_round():
    ring = SlotRing(5)
    assert ring.take(3) == [range(3)]
    assert ring.take(4) == [range(3, 5)]
    assert ring.take(1) == []
    ring.release(0)
    ring.release(1)
    assert ring.take(1) == [range(1)]
    for slot in (2, 3, 4):
        ring.release(slot)
    assert (ring.num_free, ring.take(9)) == (4, [range(1, 5)])
    assert ring.num_free == 0
    for slot in range(5):
        ring.release(slot)
    ring.take(2)
    assert ring.take(3) == [range(2, 5)]


@pytest.mark.parametrize("num_bytes", [8, 12, 6, 7])
def test_blocks_of_any_size_come_back(num_bytes):
    device = LateDevice(is_eager=True)
    cache = torch.randint(0, 256, (6, num_bytes), dtype=torch.uint8)
    copier = DeviceCopier([cache], device)
    [first, second] = copier.copy_out([(4,), (2,)])
    assert first.content().tolist() == cache[4].tolist()
    assert second.content().tolist() == cache[2].tolist()
    copier.copy_in((0,), first.content(), copier.mark()).wait()
    assert torch.equal(cache[0], cache[4])


def copiers_of_groups() -> tuple[list[torch.Tensor], list[BlockCopier]]:
    """Three groups, one of which has no layers; a copier on a device, and one on the host."""
    caches = [torch.randint(0, 256, (6, num_bytes), dtype=torch.uint8) for num_bytes in (8, 0, 3)]
    stores = [TensorBlocks(SimpleNamespace(tensor=cache)) for cache in caches]
    return caches, [DeviceCopier(caches, LateDevice(is_eager=True)), HostCopier(stores)]


@pytest.mark.parametrize("number", [0, 1])
def test_the_parts_of_all_groups_are_one_block(number):
    (wide, _, narrow), copiers = copiers_of_groups()
    copier = copiers[number]
    assert copier.bytes_per_block == 11
    copies = copier.copy_out([(0, 3, 5), (2, 1, 4)])
    contents = [copy.content().copy() for copy in copies]
    assert [content.tolist() for content in contents] == [
        [*wide[0].tolist(), *narrow[5].tolist()],
        [*wide[2].tolist(), *narrow[4].tolist()],
    ]
    copier.copy_in((1, 2, 3), contents[0], copier.mark()).wait()
    assert torch.equal(wide[1], wide[0])
    assert torch.equal(narrow[3], narrow[5])
    before = narrow.clone()
    copier.copy_in((0, NULL_BLOCK, NULL_BLOCK), contents[1], copier.mark()).wait()
    assert torch.equal(wide[0], wide[2])
    assert torch.equal(narrow, before)


def test_nothing_is_written_after_the_copy_to_another_group_has_failed(monkeypatch):
    device = LateDevice(is_eager=True)
    caches = [torch.zeros((6, num_bytes), dtype=torch.uint8) for num_bytes in (8, 3)]
    copier: DeviceCopier = DeviceCopier(caches, device)
    answers = iter([None, DeviceError("copy fails"), None, None])

    def check(call: str) -> None:
        error = next(answers)
        if error is not None:
            raise error

    after = copier.mark()
    monkeypatch.setattr(device, "check", check)
    with pytest.raises(DeviceError, match="copy fails"):
        copier.copy_in((1, 2), np.full(11, 9, dtype=np.uint8), after)
    assert (caches[0][1] == 9).all()  # it is done, and not still to be done
    assert not any(queue.operations for queue in device.queues)


# -- any history -------------------------------------------------------------------------------------------


PROMPTS = [list(range(1, 15)), [*range(1, 9), *range(40, 50)], list(range(60, 74))]
MACHINE_BLOCKS = 16


class DeviceTier(RuleBasedStateMachine):
    """Requests that compute or load prompts, on a device that does what it is asked when it likes.

    Blocks are free as soon as the scheduler would free them, however late the device is.
    """

    @initialize()
    def open(self) -> None:
        block_copier.MAX_STAGED_BYTES, self.max_staged = NUM_SLOTS * BLOCK * 8, block_copier.MAX_STAGED_BYTES
        self.bench = DeviceBench(num_blocks=MACHINE_BLOCKS)
        self.bench.readers.is_held = self.bench.writer.is_held = True
        self.free = list(range(MACHINE_BLOCKS))
        self.loading: dict[str, tuple[list[int], list[int]]] = {}
        self.num_requests = 0

    def take(self, prompt: list[int]) -> list[int]:
        count = -(-len(prompt) // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def has_room(self) -> bool:
        return len(self.free) >= 5

    def name(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def settle(self, received: frozenset[str]) -> None:
        """Let requests whose load has ended read what was loaded, and end."""
        for name in received:
            tokens, blocks = self.loading.pop(name)
            good = next(
                (i for i, block in enumerate(blocks) if block in self.bench.failed), len(tokens) // BLOCK
            )
            self.bench.expect(blocks, kv_of(tokens)[: good * BLOCK])
            self.bench.connector.request_finished(request_of(name, tokens), blocks)
            self.free += blocks
        self.bench.failed.clear()

    @precondition(has_room)
    @rule(prompt=st.sampled_from(PROMPTS), fails=st.booleans())
    def compute(self, prompt: list[int], fails: bool) -> None:
        blocks, name = self.take(prompt), self.name()
        request = request_of(name, prompt)
        self.bench.connector.get_num_new_matched_tokens(request, 0)
        self.bench.connector.update_state_after_alloc(request, np.array([blocks]), 0)

        values = kv_of(prompt) + 0.5 * fails

        def compute() -> None:
            self.bench.write(blocks, values)
            self.bench.expect(blocks, values)

        received = self.bench.step(
            request,
            blocks,
            tokens=len(prompt),
            compute=compute,
            failed_ids=lambda: frozenset([name] * fails),
        )
        self.settle(received)
        self.bench.connector.request_finished(request, blocks)
        self.free += blocks

    @precondition(has_room)
    @rule(prompt=st.sampled_from(PROMPTS))
    def load(self, prompt: list[int]) -> None:
        blocks, name = self.take(prompt), self.name()
        request = request_of(name, prompt)
        count, _ = self.bench.connector.get_num_new_matched_tokens(request, 0)
        self.bench.connector.update_state_after_alloc(request, np.array([blocks]), count)
        if not count:
            self.bench.connector.request_finished(request, ())
            self.free += blocks
            return
        self.loading[name] = prompt[:count], blocks
        self.step()

    @rule()
    def step(self) -> None:
        self.settle(self.bench.step())

    @precondition(lambda self: self.loading)
    @rule(choice=st.integers(0, 9))
    def cancel(self, choice: int) -> None:
        name = list(self.loading)[choice % len(self.loading)]
        tokens, blocks = self.loading.pop(name)
        self.bench.connector.cancel_load(name)
        self.bench.connector.request_finished(request_of(name, tokens), ())
        self.step()
        self.free += blocks

    @rule(choices=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def go_on(self, choices: list[int]) -> None:
        for choice in choices:
            self.bench.device.run(lambda ready, choice=choice: ready[choice % len(ready)])

    @rule(count=st.integers(1, 3))
    def read(self, count: int) -> None:
        self.bench.readers.run_held(count)

    @rule(count=st.integers(1, 3), cancels=st.booleans())
    def read_and_be_interrupted(self, count: int, cancels: bool) -> None:
        """Steps take place while a reader waits for its copy."""

        def interrupt() -> None:
            self.bench.device.on_wait = lambda: None
            if cancels and self.loading:
                self.cancel(0)
            elif self.has_room():
                self.compute(PROMPTS[2])

        self.bench.device.on_wait = interrupt
        self.bench.readers.run_held(count)
        self.bench.device.on_wait = lambda: None

    @rule(count=st.integers(1, 3))
    def write(self, count: int) -> None:
        self.bench.writer.run_held(count)

    @rule(call=st.sampled_from(["gather", "copy", "wait", "hold"]), count=st.integers(1, 2))
    def fail(self, call: str, count: int) -> None:
        self.bench.device.failing = {call: count}

    @rule()
    def reset(self) -> None:
        self.bench.connector.reset()

    @invariant()
    def memory_is_bounded_and_nothing_wrong_was_seen(self) -> None:
        assert not self.bench.wrong
        assert self.bench.device.num_pinned_bytes <= (NUM_SLOTS + NUM_READERS) * BLOCK * 8

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.device.failing = {}
            self.bench.readers.run_held()
            self.settle(self.bench.step())
            assert not self.loading
            self.bench.end()
            block_copier.MAX_STAGED_BYTES = self.max_staged


TestDeviceTier = DeviceTier.TestCase
TestDeviceTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
