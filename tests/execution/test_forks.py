"""Rows that go on from others' tokens, tokens that the scheduler chooses, and plans that are told again."""

import numpy as np
import pytest
import torch
from step_driver import BLOCK_SIZE, add_all, int_array, make_driver, plan

from caches import make_cache
from quire.sampling_params import SamplingParams
from quire.step import ForkData, NewRequestData

PARAMS = SamplingParams(
    temperature=1.2,
    seed=3,
    logprobs=1,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    bad_words_token_ids=((9, 8),),
)
GREEDY = SamplingParams(temperature=0.0)


def continued(model, prompt, output, num_output, params=PARAMS):
    """What a fresh request with these tokens generates next."""
    driver = make_driver(model, seed=11)
    driver.add("fresh", prompt, params)
    driver.requests["fresh"].output = list(output)
    driver.run(num_output)
    request = driver.requests["fresh"]
    return request.output, request.logprobs


def new_request(request_id, slot, prompt, params=PARAMS, *, output=(), blocks=(), computed=0):
    return NewRequestData(
        request_id=request_id,
        slot=slot,
        prompt_token_ids=int_array(prompt),
        output_token_ids=list(output),
        sampling_params=params,
        eos_token_ids=(),
        block_ids=int_array([blocks]),
        num_computed_tokens=computed,
    )


class Beams:
    """Slots 0 to N - 1 with the same prompt, driven token by token; every slot has blocks of its own."""

    def __init__(self, model, prompt, num_beams, params=PARAMS):
        self.driver = make_driver(model, num_blocks=60)
        self.runner, self.prompt, self.params = self.driver.runner, list(prompt), params
        self.ids = [f"b{index}" for index in range(num_beams)]
        self.blocks = [list(range(index * 15, index * 15 + 15)) for index in range(num_beams)]
        self.outputs = [[] for _ in self.ids]
        self.sampled = self._start()

    def _start(self):
        """The first computes the prompt; the others are admitted with nothing, and go on from it."""
        length = len(self.prompt)
        first, *others = range(len(self.ids))
        new = [new_request(self.ids[first], first, self.prompt, self.params, blocks=self.blocks[first])]
        new += [new_request(self.ids[i], i, self.prompt, self.params, computed=length) for i in others]
        result = self.runner.execute(plan([first], [length], [0], self.ids[:1], new=new))
        token = int(result.sampled_token_ids[0, 0])
        return [token] * len(self.ids)

    def step(self, parents, tokens):
        """Let beam i go on from beam `parents[i]`, with the last token `tokens[i]`; sample one more."""
        known = len(self.prompt) + len(self.outputs[0]) + 1
        before = list(self.outputs)
        forks, copies = [], []
        for beam, parent in enumerate(parents):
            self.outputs[beam] = [*before[parent], tokens[beam]]
            if beam != parent:
                forks.append(ForkData(beam, parent, int_array([self.blocks[beam]]), known, known - 1))
                copies += zip(self.blocks[parent], self.blocks[beam], strict=True)
        slots = range(len(self.ids))
        ones = [1] * len(self.ids)
        result = self.runner.execute(
            plan(
                slots, ones, [known - 1 for _ in slots], self.ids,
                known=[known for _ in slots], forks=forks, chosen=list(enumerate(tokens)), copies=copies,
            )
        )  # fmt: skip
        self.sampled = result.sampled_token_ids[:, 0].tolist()
        self.logprobs = [result.logprobs[request_id] for request_id in self.ids]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fork_goes_on_like_a_fresh_request_with_the_same_tokens(models, prompts, dtype):
    model, prompt = models[dtype], prompts[2]
    beams = Beams(model, prompt, 3)
    rng = np.random.default_rng(1)
    beams.step([0, 0, 0], rng.integers(3, 380, 3).tolist())
    for parents in ([0, 1, 2], [1, 0, 0], [2, 2, 1], [0, 0, 2], [1, 2, 0], [2, 1, 2]):
        beams.step(parents, rng.integers(3, 380, 3).tolist())
        for output, sampled, logprobs in zip(beams.outputs, beams.sampled, beams.logprobs, strict=True):
            expected, expected_logprobs = continued(model, prompt, output, len(output) + 1)
            assert [*output, sampled] == expected
            assert logprobs == expected_logprobs


def test_a_request_that_was_generated_elsewhere_goes_on(models, prompts):
    model = models["float32"]
    driver = make_driver(model)
    driver.add("whole", prompts[3], PARAMS)
    driver.run(14)
    whole = driver.requests["whole"]
    for split in (1, 7, 13):
        output, logprobs = continued(model, prompts[3], whole.output[:split], 14)
        assert output == whole.output
        assert logprobs == whole.logprobs[split:]


def test_tokens_that_were_never_applied_are_void(models, prompts):
    """A step's token may be dropped; the row is cut to what the plan knows, and computed again from there."""
    model = models["float32"]
    plain, cut = make_driver(model), make_driver(model)
    for driver in (plain, cut):
        driver.add("r", prompts[2], PARAMS)
    plain.run(8)
    request = cut.requests["r"]
    cut.step({"r": len(prompts[2])})
    for number_void in (0, 1, 2, 1, 0, 3, 0):
        while len(request.output) < number_void + 1:
            cut.step({"r": 1})
        del request.output[len(request.output) - number_void :], request.logprobs[-number_void or 99 :]
        request.computed = request.num_known - 1
        cut.step({"r": 1})
    cut.run(8)
    assert request.output == plain.requests["r"].output
    assert request.logprobs == plain.requests["r"].logprobs


def test_a_request_told_again_is_replaced(models, prompts):
    driver = make_driver(models["float32"])
    add_all(driver, prompts[2:4], GREEDY)
    driver.run(6)
    first, second = (request.output for request in driver.requests.values())
    runner = make_driver(models["float32"]).runner

    def told(slot, blocks):
        new = new_request("r", slot, prompts[2], GREEDY, blocks=blocks)
        return runner.execute(plan([slot], [17], [0], ["r"], new=[new]))

    for slot, start in ((1, 0), (1, 10), (5, 20)):
        assert told(slot, range(start, start + 6)).sampled_token_ids.tolist() == [first[:1]]
    assert runner.num_requests == 1
    other = new_request("other", 1, prompts[3], GREEDY, blocks=range(30, 41))  # the slot was left
    result = runner.execute(plan([1, 5], [40, 1], [0, 17], ["other", "r"], new=[other]))
    assert result.sampled_token_ids.tolist() == [second[:1], first[1:2]]
    runner.execute(plan(preempted=["r", "r", "unknown"], finished=["r", "other", "r", "unknown"]))
    assert runner.num_requests == 0


def test_blocks_are_copied_whole_and_as_they_were():
    cache = make_cache(6, 2, 2, BLOCK_SIZE, 8, torch.float32)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    before = cache.tensor.clone()
    cache.copy_blocks(int_array([[0, 3], [3, 4], [1, 0]]))
    expected = before.clone()
    for source, target in ((0, 3), (3, 4), (1, 0)):
        expected[target] = before[source]
    assert torch.equal(cache.tensor, expected)
    cache.copy_blocks(int_array([]).reshape(0, 2))
    assert torch.equal(cache.tensor, expected)


def test_blocks_are_copied_before_the_step_writes(models, prompts):
    """Copy on write: two requests share a partly filled block until one of them writes to it."""
    model, prompt = models["float32"], prompts[2]  # 17 tokens: four full blocks and one place
    expected, _ = continued(model, prompt, [], 3, GREEDY)
    driver = make_driver(model)
    runner = driver.runner
    new = new_request("a", 0, prompt, GREEDY, blocks=[0, 1, 2, 3, 4])
    runner.execute(plan([0], [17], [0], ["a"], new=[new]))
    sharing = new_request("b", 1, prompt, GREEDY, output=[200], blocks=[0, 1, 2, 3, 5], computed=17)
    result = runner.execute(
        plan([0, 1], [1, 1], [17, 17], ["a", "b"], known=[18, 18], new=[sharing], copies=[[4, 5]])
    )
    other, _ = continued(model, prompt, [200], 2, GREEDY)
    assert result.sampled_token_ids[:, 0].tolist() == [expected[1], other[1]]
    result = runner.execute(plan([0, 1], [1, 1], [18, 18], ["a", "b"]))
    assert result.sampled_token_ids[0, 0] == expected[2]
