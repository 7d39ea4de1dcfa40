"""Steps whose tokens a device chooses while the next step is already begun: the tokens of serial steps."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

import preloaded
from host_choice import HostChoice
from late_tokens import LateCopy, choose_on_device
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.execution.drafts.adaptive_proposer import DraftedRequest, Waiting
from quire.execution.persistent_batch import PersistentBatch
from quire.execution.sampling.sampler import Sampler
from quire.execution.step_graphs import StepLogits

pytestmark = pytest.mark.usefixtures("preloaded_engines")

PROMPTS = ["What is 27 + 58?", "Copy: k x w q", "Hello", "Why is a request preempted?", "Reverse: a b c"]
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3, "ngram_min": 1}
SETTINGS: dict[str, Any] = {"num_kv_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 24}


@pytest.fixture
def unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return choose_on_device(monkeypatch)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what requests are preempted, as they are."""
    request_ids: list[str] = []
    preempt = PersistentBatch.preempt

    def watched(self: PersistentBatch, request_id: str) -> int | None:
        request_ids.append(request_id)
        return preempt(self, request_id)

    monkeypatch.setattr(PersistentBatch, "preempt", watched)
    return request_ids


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=0.7, seed=4, max_tokens=11, top_k=9, min_p=0.01, n=2),
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=1),
]
SEQUENCES = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=8, bad_words=["k x", "x w"], ignore_eos=True),
    SamplingParams(temperature=0.9, seed=8, max_tokens=8, bad_words=["is a", "KV"], logprobs=1),
    SamplingParams(
        temperature=0.0,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(regex="[0-9]+"),
        bad_words=["is a"],
        presence_penalty=1.1,
        logprobs=1,
    ),
    SamplingParams(temperature=0.0, max_tokens=6, beam_width=2, n=2),
    SamplingParams(temperature=0.0, max_tokens=6, min_tokens=4, prompt_logprobs=1),
]
PENALIZED = [
    SamplingParams(temperature=0.0, max_tokens=14, repetition_penalty=1.4, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, frequency_penalty=1.5, presence_penalty=-0.5, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0.0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[0-9]+"),
        frequency_penalty=2.0,
        logit_bias={79: 3.0},
        logprobs=1,
    ),
    SamplingParams(temperature=1.2, max_tokens=8, n=3, seed=9, repetition_penalty=1.2, ignore_eos=True),
]
CONSTRAINED = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=2),
    SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(regex="[0-9]+"),
        logprobs=1,
    ),
    SamplingParams(
        temperature=1.0, seed=6, max_tokens=9, min_tokens=6, logit_bias={79: 5.0, 1: 2.0}, logprobs=0
    ),
    SamplingParams(
        temperature=0.9, seed=7, max_tokens=8, allowed_token_ids=[5, 79, 300, 433], ignore_eos=True
    ),
    SamplingParams(
        temperature=0.0,
        max_tokens=6,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        allowed_token_ids=[3],
    ),
]


def tokens(params: list[SamplingParams], **options: Any) -> list[Any]:
    with LLM("mini", **{**SETTINGS, **options}) as llm:
        outputs = llm.generate(
            [prompt for prompt in PROMPTS for _ in "ab"], [p for p in params for _ in "ab"]
        )
        return [
            [
                (
                    list(completion.token_ids),
                    rounded(str(completion.logprobs)),
                    completion.finish_reason,
                    completion.error_param,
                )
                for completion in output.outputs
            ]
            for output in outputs
        ]


def rounded(logprobs: str) -> str:
    """Kernels may add up the weights of a row in another order."""
    return re.sub(r"-?\d+\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.9f}", logprobs)


@pytest.fixture(scope="module")
def serial() -> dict[int, list[Any]]:
    """The tokens of serial steps, sampled on the host."""
    with preloaded.engines():
        return {id(params): tokens(params) for params in (PARAMS, SEQUENCES, CONSTRAINED, PENALIZED)}


def test_tokens_stay_on_the_device_between_steps(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    assert tokens(PARAMS, overlap_steps=True) == serial[id(PARAMS)]
    assert sum(unknown_tokens) > 30


def test_serial_steps_of_a_device(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    assert tokens(PARAMS) == serial[id(PARAMS)]


def test_with_preemptions(unknown_tokens: list[int], preempted: list[str]) -> None:
    options = {"num_kv_blocks": 7, "block_size": 4, "enable_prefix_caching": False, "max_model_len": 28}
    found = tokens(PARAMS, overlap_steps=True, **options)
    assert len(preempted) > 3
    assert sum(unknown_tokens) > 10
    assert found == tokens(PARAMS, **{**options, "num_kv_blocks": 40})


def test_banned_sequences_beams_and_log_probabilities_of_prompts(
    serial: dict[int, Any], unknown_tokens: list[int]
) -> None:
    assert tokens(SEQUENCES, overlap_steps=True) == serial[id(SEQUENCES)]
    assert sum(unknown_tokens) > 10


@pytest.mark.histories
@pytest.mark.parametrize("drafts", [{}, NGRAM], ids=["no drafts", "drafts"])
def test_sequences_are_banned_whose_last_token_but_one_only_the_device_knows(
    unknown_tokens: list[int], drafts: dict[str, Any]
) -> None:
    """Pairs, triples and quadruples of the tokens that are likeliest, and of those that take their place."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    banned: set[tuple[int, ...]] = set()
    lengths = itertools.cycle((2, 3, 4))
    for _ in range(3):
        params = dataclasses.replace(greedy, bad_words_token_ids=tuple(sorted(banned)))
        outputs = tokens([params] * len(PROMPTS))
        assert tokens([params] * len(PROMPTS), overlap_steps=True, **drafts) == outputs
        ids = [completion[0] for [completion] in outputs]
        begun = {tuple(output[at : at + n]) for output in ids for n in (2, 3, 4) for at in range(len(output))}
        assert not begun & banned
        banned |= {tuple(output[at : at + next(lengths)]) for output in ids for at in range(0, 12, 3)}
    assert len(banned) > 30
    assert sum(unknown_tokens) > 30


def test_constraints_grammars_and_logprobs_of_the_device(
    serial: dict[int, Any], unknown_tokens: list[int]
) -> None:
    assert tokens(CONSTRAINED, overlap_steps=True) == serial[id(CONSTRAINED)]
    assert sum(unknown_tokens) > 10
    # The grammar and the allowed token leave none.
    assert serial[id(CONSTRAINED)][8][0][2:] == ("error", "structured_outputs")


def test_penalties_of_the_device(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    for options in ({"overlap_steps": True}, {}):
        assert tokens(PENALIZED, **options) == serial[id(PENALIZED)]
    assert sum(unknown_tokens) > 30
    plain = [dataclasses.replace(params, repetition_penalty=1, frequency_penalty=0) for params in PENALIZED]
    assert sum(one != other for one, other in zip(tokens(plain), serial[id(PENALIZED)], strict=True)) >= 6


@pytest.mark.histories
@pytest.mark.parametrize("drafts", [{}, NGRAM], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("lost", [None, 3])
def test_penalties_with_preemptions_and_steps_that_fail(
    unknown_tokens: list[int], lost: int | None, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that go on elsewhere, and tokens that were counted and discarded."""
    sample = Sampler.sample
    calls: list[int] = []

    def failing(self: Sampler, logits: StepLogits, *args: Any, **options: Any) -> Any:
        found = sample(self, logits, *args, **options)
        calls.append(1)
        if lost and len(calls) % 7 == lost and len(logits.rows) > 1:  # one alone would be taken for the cause
            raise RuntimeError("the step is lost, and its tokens are counted")
        return found

    options = {"num_kv_blocks": 8, "block_size": 4, "enable_prefix_caching": False, "max_model_len": 32}
    params = [*PENALIZED[:4], PENALIZED[1]]
    expected = tokens(params, **{**options, "num_kv_blocks": 60})
    monkeypatch.setattr(Sampler, "sample", failing)
    assert tokens(params, overlap_steps=True, **options, **drafts) == expected


@pytest.mark.histories
def test_penalties_with_drafts(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    """The device counts drafts, too."""
    assert tokens(PENALIZED, overlap_steps=True, **NGRAM) == serial[id(PENALIZED)]
    assert sum(unknown_tokens) > 10


def test_with_drafts(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    options = {"speculative_method": "ngram", "num_speculative_tokens": 3}
    assert tokens(PARAMS, overlap_steps=True, **options) == serial[id(PARAMS)]


def always_three(self: DraftedRequest, num_tokens: int, cost: float, most: int) -> int:
    """Choose a length, whether or not drafts pay, which depends on measured times."""
    self.worth = 2.0
    return min(3, most)


@pytest.mark.histories
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_that_are_followed_by_no_drafts(
    serial: dict[int, Any], unknown_tokens: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftedRequest, "choose_length", always_three)
    monkeypatch.setattr(Waiting, "_all_should_wait", lambda *_: True)
    options = {"speculative_method": method, "num_speculative_tokens": 3, "max_num_draft_tokens": 3}
    assert tokens(PARAMS, overlap_steps=True, **options) == serial[id(PARAMS)]
    assert sum(unknown_tokens) > 10
    unknown_tokens.clear()
    assert tokens(PARAMS, overlap_steps=True, **options, max_num_seqs=1) == serial[id(PARAMS)]
    assert sum(unknown_tokens) == 0, "all steps of one request are followed by drafts"


@pytest.mark.histories
def test_steps_while_no_draft_is_expected_to_pay(
    unknown_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def every_eighth(
        self: Waiting, requests: list[DraftedRequest], others: list[DraftedRequest], step: int, now: float
    ) -> None:
        for request in requests:
            request.idle_until = step + 7 if step % 8 else step

    monkeypatch.setattr(DraftedRequest, "choose_length", always_three)
    monkeypatch.setattr(Waiting, "choose", every_eighth)
    options = {"max_num_seqs": 1, "max_model_len": 100, "speculative_method": "ngram", "ngram_min": 1}
    params = [SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)]
    found = tokens(params * len(PROMPTS), overlap_steps=True, **options)
    assert sum(unknown_tokens) > 100
    assert found == tokens(params * len(PROMPTS), **SETTINGS)


@pytest.fixture
def split_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has requests wait for drafts at random; returns of each step in flight whether only some wait."""
    rng = np.random.default_rng(11)
    append_unknown, splits = PersistentBatch.append_unknown, []

    def some_wait(
        self: Waiting, requests: list[DraftedRequest], others: list[DraftedRequest], step: int, now: float
    ) -> None:
        for request in requests + (others if rng.random() < 0.2 else []):
            request.idle_until = step + int(rng.choice([0, 3, 6]))

    def watched(self: PersistentBatch, slots: Any, goes_on: Any) -> Any:
        splits.append(len(set(goes_on.tolist())) == 2)
        return append_unknown(self, slots, goes_on)

    monkeypatch.setattr(DraftedRequest, "choose_length", always_three)
    monkeypatch.setattr(Waiting, "choose", some_wait)
    monkeypatch.setattr(PersistentBatch, "append_unknown", watched)
    return splits


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("params", [PARAMS, CONSTRAINED], ids=["plain", "constrained"])
def test_some_requests_wait_for_drafts_and_others_go_on(
    serial: dict[int, Any],
    unknown_tokens: list[int],
    split_steps: list[bool],
    params: list[SamplingParams],
    method: str,
) -> None:
    options = {**NGRAM, "speculative_method": method}
    assert tokens(params, overlap_steps=True, **options) == serial[id(params)]
    assert sum(split_steps) > 1
    assert sum(unknown_tokens) > 3


@pytest.mark.histories
@pytest.mark.parametrize("params", [PENALIZED, SEQUENCES], ids=["penalized", "sequences"])
def test_drafts_of_some_of_these(
    serial: dict[int, Any],
    unknown_tokens: list[int],
    split_steps: list[bool],
    params: list[SamplingParams],
) -> None:
    assert tokens(params, overlap_steps=True, **NGRAM) == serial[id(params)]
    assert split_steps


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize("failing", [False, True])
def test_drafts_of_some_with_preemptions_and_steps_that_fail(
    unknown_tokens: list[int],
    split_steps: list[bool],
    preempted: list[str],
    failing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Sampler.sample
    calls: list[int] = []

    def faulty(self: Sampler, logits: StepLogits, *args: Any, **options: Any) -> Any:
        found = sample(self, logits, *args, **options)
        calls.append(1)
        if failing and len(calls) % 9 == 3 and len(logits.rows) > 4:  # one alone would be taken for the cause
            monkeypatch.setattr(found, "_wait", fail)
        return found

    def fail() -> Any:
        raise RuntimeError("the device has lost the step")

    options = {"num_kv_blocks": 8, "block_size": 4, "enable_prefix_caching": False, "max_model_len": 32}
    expected = tokens(PARAMS, **{**options, "num_kv_blocks": 60})
    preempted.clear()
    monkeypatch.setattr(Sampler, "sample", faulty)
    assert tokens(PARAMS, overlap_steps=True, **options, **NGRAM) == expected
    assert len(preempted) > 3
    assert sum(split_steps) > 1


@pytest.mark.histories
def test_a_draft_model_beside_steps_in_flight(serial: dict[int, Any], unknown_tokens: list[int]) -> None:
    options = {"speculative_method": "draft-model", "draft_model": "mini", "num_speculative_tokens": 3}
    assert tokens(PARAMS, overlap_steps=True, **options) == serial[id(PARAMS)]


def test_logits_that_are_no_numbers_end_their_request_only(
    serial: dict[int, Any], unknown_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = HostChoice.choose
    seen = []

    def damaged(self: HostChoice, logits: torch.Tensor, *how: Any) -> Any:
        seen.append(len(logits))
        if len(seen) == 9:
            logits[0, 5] = float("nan")
        return choose(self, logits, *how)

    monkeypatch.setattr(HostChoice, "choose", damaged)
    with LLM("mini", **SETTINGS, overlap_steps=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS[:2] + PARAMS[3:] + PARAMS[:1])
    errors = [output.outputs[0].finish_reason for output in outputs]
    assert errors.count("error") == 1


def test_a_device_that_fails_while_tokens_are_awaited_fails_the_step(
    serial: dict[int, Any], unknown_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = LateCopy.wait
    in_main_thread: list[LateCopy] = []

    def failing(self: LateCopy) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            in_main_thread.append(self)
            if len(in_main_thread) == 15:
                raise RuntimeError("the device is busy")
        return wait(self)

    monkeypatch.setattr(LateCopy, "wait", failing)
    assert tokens(PARAMS, overlap_steps=True) == serial[id(PARAMS)]
    assert len(in_main_thread) > 15


def test_tokens_are_not_lost_if_a_device_cannot_say_whether_they_have_arrived(
    serial: dict[int, Any], unknown_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host goes on with must be what clients were sent."""
    has_arrived = LateCopy.has_arrived
    num_asked = itertools.count()

    def failing(self: LateCopy) -> bool:
        if next(num_asked) % 5 == 3:
            raise RuntimeError("the device does not answer")
        arrived: bool = has_arrived.fget(self)  # type: ignore[attr-defined]
        return arrived

    monkeypatch.setattr(LateCopy, "has_arrived", property(failing))
    assert tokens(PARAMS, overlap_steps=True) == serial[id(PARAMS)]
    assert next(num_asked) > 3  # how often depends on how busy the machine is
