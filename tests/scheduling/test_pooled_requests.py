"""Requests that are pooled end when their prompts are computed, with a row and no token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_runner import FakeRunner
from scene import Scene

from preempting import preempt
from quire.errors import InvalidRequestError
from quire.pooling_params import PoolingParams
from quire.recording.calls import RecordedRequest
from quire.status import FinishReason, RequestStatus
from quire.step import NO_TOKEN, ModelRunnerOutput, SchedulerOutput

KINDS = ("last", "cls", "mean")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]


class PoolingRunner(FakeRunner):
    """Has a row where its base class has a token: the tokens of the prompt, whose KV that has checked."""

    def execute(self, plan: SchedulerOutput, grammar: object = None) -> ModelRunnerOutput:
        result = super().execute(plan, grammar)
        assert all(new.pooling_params is not None for new in plan.scheduled_new_reqs)
        pooled = {}
        for name in np.array(plan.request_ids)[result.sampled_token_ids[:, 0] != NO_TOKEN].tolist():
            self.tokens[name].pop()
            if name not in self.fail:
                pooled[name] = row_of(self.tokens[name])
        nothing = np.full_like(result.sampled_token_ids, NO_TOKEN)
        return dataclasses.replace(result, sampled_token_ids=nothing, pooled=pooled)


def row_of(prompt: list[int]) -> bytes:
    return np.array(prompt, dtype=np.float32).tobytes()


class PoolingScene(Scene):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.runner = PoolingRunner(self.num_blocks, self.config.block_size)

    def pool(self, name: str, prompt: list[int], kind: str = "last", **fields) -> None:
        params = PoolingParams(pooling_type=kind, normalize=False)
        self.add(
            name, prompt, max_tokens=1, temperature=0.0, ignore_eos=True, pooling_params=params, **fields
        )

    def check_rows(self, *names: str) -> None:
        for name in names or self.requests:
            assert self.reasons[name] is FinishReason.STOP
            assert self.ends[name].pooled == row_of(self.requests[name].prompt_token_ids)
            assert self.outputs[name] == []


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("options", [{}, {"dynamic_split_fuse": False, "enable_prefix_caching": False}])
def test_prompts_end_with_their_rows(options, is_overlapped):
    scene = PoolingScene(max_num_batched_tokens=14, max_num_seqs=3, overlap_steps=is_overlapped, **options)
    for number in range(7):
        scene.pool(f"r{number}", PROMPT[: 2 * number + 1], KINDS[number % 3])
    (scene.finish_overlapped if is_overlapped else scene.finish)()
    scene.check_rows()
    assert scene.scheduler.make_stats().num_finished == 7


def test_whole_prompts_are_in_one_step_each():
    scene = PoolingScene(max_num_batched_tokens=14, dynamic_split_fuse=False, enable_prefix_caching=False)
    for name in "abcde":
        scene.pool(name, PROMPT[:6], "mean")
    while scene.scheduler.has_requests():
        assert set(scene.step().values()) <= {6}
    scene.check_rows()


def test_only_the_last_tokens_row_can_do_without_a_prefix():
    scene = PoolingScene(max_num_batched_tokens=64)
    for number, kind in enumerate(("last", *KINDS)):
        scene.pool(f"r{number}", PROMPT, kind)
        scene.finish()
    scene.check_rows()
    assert scene.cached == {"r0": 0, "r1": 12, "r2": 0, "r3": 0}
    assert scene.scheduler.make_stats().prefix_queried_tokens == 2 * len(PROMPT)


def test_prefixes_within_a_step_are_not_leaned_on_for_a_mean():
    scene = PoolingScene(max_num_batched_tokens=64)
    for name, kind in zip("abc", ("mean", "mean", "last"), strict=True):
        scene.pool(name, PROMPT, kind)
    assert scene.step() == {"a": 13, "b": 13, "c": 1}
    scene.finish()
    scene.check_rows()


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_prompt_starts_again(kind):
    scene = PoolingScene(max_num_batched_tokens=5)
    scene.pool("a", PROMPT, kind)
    scene.step()
    scene.step()
    preempt(scene.scheduler, 0)
    assert scene.step() == {"a": 5}
    scene.finish()
    scene.check_rows()


def test_a_prompt_may_be_as_long_as_the_model_allows():
    scene = PoolingScene(max_model_len=16, num_blocks=4)
    scene.pool("a", [1] * 16)
    scene.finish()
    scene.check_rows()
    with pytest.raises(InvalidRequestError, match=r"17 tokens; at most 16 leave room for what it returns"):
        scene.pool("b", [1] * 17)


def test_a_row_is_for_the_request_that_was_computed():
    scene = PoolingScene(overlap_steps=True)
    scene.pool("a", PROMPT)
    plan = scene.plan()
    computed = scene.compute(plan)
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.pool("a", PROMPT[:3])
    scene.apply(plan, computed)
    assert not scene.ends
    scene.finish()
    scene.check_rows()


def test_one_request_that_fails_ends_alone():
    scene = PoolingScene()
    for name in "ab":
        scene.pool(name, PROMPT, "mean")
    scene.runner.fail.add("a")
    scene.finish()
    assert scene.errors["a"] == "broken"
    assert scene.ends["a"].pooled is None
    scene.check_rows("b")


def test_a_row_that_is_missing_is_an_error():
    scene = PoolingScene()
    scene.pool("a", PROMPT)
    plan = scene.plan()
    scene.apply(plan, dataclasses.replace(scene.compute(plan), pooled={}))
    assert "returned no token, or row, for this request" in scene.errors["a"]
    scene.finish()


def test_a_prompt_can_be_pinned():
    scene = PoolingScene()
    scene.pool("a", PROMPT, pin_prefix=10.0)
    scene.finish_but_pins()
    scene.check_rows()
    assert scene.scheduler.make_stats().num_leased_blocks == 3


def test_it_is_recorded():
    scene = PoolingScene()
    scene.pool("a", PROMPT, "mean")
    again = RecordedRequest.of(scene.requests["a"]).to_request()
    assert again.pooling_params == PoolingParams(pooling_type="mean", normalize=False)
    assert again.needs_whole_prompt
