"""Log-probabilities of prompts: each position once, whatever becomes of the steps that compute it."""

from __future__ import annotations

from typing import Any

import pytest

from late_tokens import choose_on_device
from quire import LLM, SamplingParams
from quire.execution.model_runner import ModelRunner
from quire.execution.persistent_batch import PersistentBatch
from quire.request_output import Logprob
from quire.step import SchedulerOutput

PROMPTS = ["Why is a request preempted? " * repeats for repeats in (1, 30, 2, 4, 28, 3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 512}


def prompt_logprobs(num_kv_blocks: int, *, overlap_steps: bool) -> list[Any]:
    with LLM("mini", num_kv_blocks=num_kv_blocks, overlap_steps=overlap_steps, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
    return [[_rounded(position or {}) for position in output.prompt_logprobs or []] for output in outputs]


def _rounded(position: dict[int, Logprob]) -> list[tuple[int, int, float]]:
    """Kernels may add up the weights of a row in another order."""
    return [(token_id, found.rank, round(found.logprob, 9)) for token_id, found in position.items()]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return prompt_logprobs(200, overlap_steps=False)


@pytest.fixture(params=[False, True], ids=["host", "device"], autouse=True)
def is_found_on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        choose_on_device(monkeypatch)
    return bool(request.param)


@pytest.fixture
def preempted_amid_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    preempt = PersistentBatch.preempt

    def watched(self: PersistentBatch, request_id: str) -> int | None:
        slot = preempt(self, request_id)
        if slot is not None and self.prompt_logprobs_end[slot]:
            found.append(request_id)
        return slot

    monkeypatch.setattr(PersistentBatch, "preempt", watched)
    return found


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("overlap_steps", [False, True])
def test_requests_that_are_preempted_amid_their_prompts(
    expected: list[Any], preempted_amid_prompts: list[str], overlap_steps: bool
) -> None:
    """A chunk may be on its way then, whose report is discarded."""
    assert prompt_logprobs(40, overlap_steps=overlap_steps) == expected
    assert preempted_amid_prompts


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("overlap_steps", [False, True])
def test_steps_that_are_lost(
    expected: list[Any], overlap_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lost = 0
    execute = ModelRunner.execute

    def losing(self: ModelRunner, output: SchedulerOutput, *args: Any) -> Any:
        nonlocal num_lost
        found = execute(self, output, *args)
        is_amid_prompt = self._batch.prompt_logprobs_end[output.slots] > 0
        has_begun = (is_amid_prompt & (output.num_computed_tokens > 50)).any()
        if has_begun and len(output.slots) > 1 and num_lost < 2:  # one alone would be taken for the cause
            num_lost += 1
            raise RuntimeError("the step was computed, and its result is lost")
        return found

    monkeypatch.setattr(ModelRunner, "execute", losing)
    assert prompt_logprobs(200, overlap_steps=overlap_steps) == expected
    assert num_lost == 2
