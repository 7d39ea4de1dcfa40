"""Steps in flight beside a KV tier: blocks are copied at once, and stored when it is known who failed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine_checks import check_after_every_step, core_of
from host_choice import HostChoice
from insides import always_load, connector_of, num_stored
from late_device import LateDevice
from late_tokens import LateCopy, choose_on_device
from preempting import preempt
from quire import LLM, SamplingParams
from quire.engine.messages import EngineCoreRequest
from quire.execution.device_step import DeviceStep
from quire.execution.persistent_batch import PersistentBatch
from quire.kv.tiers import block_copier
from quire.kv.tiers import connector as tier_connector
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.device_copier import DeviceCopier

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[start + (7 * place) % 97 for place in range(6 * 16 + 3)] for start in (100, 200, 300, 400)]
SETTINGS: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 24,  # of which a prompt and its answer take seven
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
}


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, GREEDY)
    return [
        (output.outputs[0].token_ids, str(output.outputs[0].logprobs), output.outputs[0].finish_reason)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The answers of serial steps without a tier."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose_on_device(monkeypatch)
        with LLM("mini", **SETTINGS) as llm:
            return answers(llm)


@pytest.fixture
def unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of the steps so far were unknown on the host when the next one began."""
    return choose_on_device(monkeypatch)


@pytest.fixture
def open_llm(unknown_tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Open an engine with a tier whose copies are late, on a device that knows the tokens of most steps."""
    device = LateDevice(is_eager=True)
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 4 << 20)
    monkeypatch.setattr(
        tier_connector,
        "host_copier",
        lambda caches, _: DeviceCopier([cache.tensor for cache in caches], device),
    )

    def opened(**options: Any) -> LLM:
        llm = LLM("mini", **SETTINGS, overlap_steps=True, kv_tier="memory", kv_tier_min_uses=1, **options)
        check_after_every_step(core_of(llm))
        always_load(connector_of(llm))
        return llm

    yield opened
    assert not any(queue.operations for queue in device.queues)


def poison(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the first row of one call have no logits."""
    choose, num_calls = HostChoice.choose, itertools.count()

    def poisoned(self: HostChoice, logits: torch.Tensor, *how: Any) -> Any:
        if next(num_calls) == call:
            logits[0] = float("nan")
        return choose(self, logits, *how)

    monkeypatch.setattr(HostChoice, "choose", poisoned)


def test_what_is_stored_without_waiting_comes_back(
    open_llm: Callable[..., LLM],
    expected: list[Any],
    unknown_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_thread_waits: list[bool] = []
    wait = LateCopy.wait

    def watched(self: LateCopy) -> torch.Tensor:
        steps_thread_waits.append(threading.current_thread().name.startswith("model-runner"))
        return wait(self)

    monkeypatch.setattr(LateCopy, "wait", watched)
    with open_llm() as llm:
        for _ in range(3):
            assert answers(llm) == expected
            assert [num_stored(llm, prompt) for prompt in PROMPTS] == [6] * 4
        assert llm.stats().num_loaded_tokens > 6 * 16
        assert llm.stats().num_failed_loads == 0
    assert sum(unknown_tokens) > 0
    num_seen_arriving = sum(steps_thread_waits)  # `wait` of what has arrived returns at once
    assert num_seen_arriving < len(steps_thread_waits) / 2


def test_kv_of_a_request_with_nan_logits_is_not_stored(
    open_llm: Callable[..., LLM], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin_save = TierConnector.begin_save

    def watched(self: TierConnector, failed_ids: Callable[[], frozenset[str]]) -> None:
        begun.append(len(self._stores))
        begin_save(self, failed_ids)

    monkeypatch.setattr(TierConnector, "begin_save", watched)
    with open_llm() as llm, monkeypatch.context() as damage:
        poison(damage, call=0)
        found = answers(llm, PROMPTS[:2])
        assert [finish for _, _, finish in found] == ["error", "length"]
        assert begun[0] == 6 + 1, "both prompts' blocks have been copied by then"
        assert [num_stored(llm, prompt) for prompt in PROMPTS[:2]] == [0, 6]
        assert connector_of(llm).stats().num_failed_writes == 0
        damage.undo()
        assert answers(llm) == expected
        assert num_stored(llm, PROMPTS[0]) == 6


def test_blocks_of_preempted_requests_are_others_while_they_are_copied(
    open_llm: Callable[..., LLM], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[str] = []
    preempt_in_batch = PersistentBatch.preempt

    def watched(self: PersistentBatch, request_id: str) -> int | None:
        preempted.append(request_id)
        return preempt_in_batch(self, request_id)

    monkeypatch.setattr(PersistentBatch, "preempt", watched)
    with open_llm() as llm:
        scheduler = core_of(llm).scheduler
        step, num_steps = core_of(llm).step, itertools.count(1)

        def preempting_step() -> Any:
            slots = scheduler.accounts.running.in_order()
            if next(num_steps) % 7 == 0 and slots.size > 1:
                preempt(scheduler, slots[-1])
            return step()

        monkeypatch.setattr(core_of(llm), "step", preempting_step)
        for _ in range(2):
            assert answers(llm) == expected
    assert len(preempted) > 2


def test_a_device_that_fails_while_tokens_are_awaited_leaves_nothing_wrong(
    open_llm: Callable[..., LLM], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, num_waits = LateCopy.wait, itertools.count()

    def failing(self: LateCopy) -> torch.Tensor:
        if next(num_waits) in (4, 20, 33):
            raise RuntimeError("the device is busy")
        return wait(self)

    monkeypatch.setattr(LateCopy, "wait", failing)
    with open_llm() as llm:
        for _ in range(3):
            assert answers(llm) == expected
        assert llm.stats().num_loaded_tokens > 0


def test_loads_that_end_with_a_step_that_fails_are_heard_of(
    open_llm: Callable[..., LLM], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, failed = DeviceStep.result, []

    def failing(self: DeviceStep) -> Any:
        if self.kv_connector_output is not None and self.kv_connector_output.finished_receiving:
            failed.append(self)
            if len(failed) == 1:
                raise RuntimeError("the device is busy")
        return result(self)

    monkeypatch.setattr(DeviceStep, "result", failing)
    with open_llm() as llm:
        for _ in range(3):
            assert answers(llm) == expected
        assert llm.stats().num_failed_loads == 0, "none has timed out"
    assert failed


def test_an_engine_that_is_closed_with_steps_in_flight_stores_what_they_computed(
    open_llm: Callable[..., LLM],
) -> None:
    with open_llm() as llm:
        core, connector = core_of(llm), connector_of(llm)
        core.add(EngineCoreRequest(["a"], [0], PROMPTS[0], GREEDY))
        core.add(EngineCoreRequest(["b"], [0], PROMPTS[1], GREEDY))
        core.step()
        core.step()  # the third step is in flight; the first two have computed both prompts
        assert core.has_requests()
    assert connector.stats().num_written_blocks == 12
