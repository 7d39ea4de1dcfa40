import numpy as np
import pytest
import torch
from step_driver import MAX_MODEL_LEN, add_all, int_array, make_driver, outputs, plan, preempt_now_and_then

from checkpoints import make_model
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, ForkData, NewRequestData, ResumedRequestData

NUM_OUTPUT = 20
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def reference():
    return make_model("qwen3")


@pytest.fixture(scope="module")
def greedy_tokens(reference, prompts):
    reference.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUT, do_sample=False
        )
        tokens.append(generated[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_tokens_are_those_of_transformers(models, prompts, greedy_tokens, chunk):
    driver = make_driver(models["float32"])
    add_all(driver, prompts, GREEDY)
    driver.run(NUM_OUTPUT, chunk=chunk)
    assert outputs(driver) == greedy_tokens


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mixed_steps_with_preemption_and_other_slots(models, prompts, greedy_tokens, seed):
    driver = make_driver(models["float32"], seed=seed, max_num_seqs=4)  # so that one always waits
    add_all(driver, prompts, GREEDY)
    driver.run(NUM_OUTPUT, chunk=9, budget=23, on_step=preempt_now_and_then(driver))
    assert outputs(driver) == greedy_tokens
    driver.step({})
    assert driver.runner.num_requests == 0


def test_sampled_tokens_do_not_depend_on_company_chunks_or_preemption(models, prompts):
    params = [
        SamplingParams(seed=index - 2, temperature=1.5, top_p=0.95, presence_penalty=0.5, logprobs=2)
        for index in range(len(prompts))
    ]

    def run(indices, *, seed, preempts=False, **limits):
        driver = make_driver(models["bfloat16"], seed=seed)
        for index in indices:
            driver.add(str(index), prompts[index], params[index])
        driver.run(NUM_OUTPUT, on_step=preempt_now_and_then(driver) if preempts else None, **limits)
        return {int(i): (r.output, r.logprobs) for i, r in driver.requests.items()}

    everyone = range(len(prompts))
    together = run(everyone, seed=0)
    assert len({tuple(output) for output, _ in together.values()}) == len(prompts)
    alone = {}
    for index in everyone:
        alone |= run([index], seed=index)
    assert alone == together
    assert run(everyone, seed=1, chunk=7, budget=20) == together
    assert run(everyone, seed=2, chunk=1) == together
    assert run(everyone, seed=3, chunk=16, budget=30, preempts=True) == together


def test_a_continuation_draws_what_the_request_would_have_drawn(models, prompts):
    params = SamplingParams(seed=9, temperature=1.2, top_k=40)
    driver = make_driver(models["bfloat16"])
    driver.add("whole", prompts[2], params)
    driver.run(NUM_OUTPUT)
    whole = driver.requests["whole"].output
    restarted = make_driver(models["bfloat16"], seed=5)
    restarted.add("rest", prompts[2] + whole[:8], params)
    restarted.run(NUM_OUTPUT - 8)
    assert restarted.requests["rest"].output == whole[8:]


def reference_logprobs(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)


def assert_position_is(found, expected, token, count):
    likeliest = expected.argsort(descending=True, stable=True).tolist()
    assert found.token_ids == [token, *likeliest[:count]]
    assert found.ranks == [likeliest.index(token) + 1, *range(1, count + 1)]
    np.testing.assert_allclose(found.logprobs, expected[found.token_ids].numpy(), atol=1e-4)


@pytest.mark.parametrize("chunk", [1_000, 5])
@pytest.mark.parametrize("preempts", [False, True])
def test_prompt_logprobs_are_those_of_transformers(models, reference, prompts, chunk, preempts):
    driver = make_driver(models["float32"])
    for index, prompt in enumerate(prompts):
        wanted = None if index == 3 else index
        driver.add(f"r{index}", prompt, SamplingParams(temperature=0.0, prompt_logprobs=wanted))
    driver.run(6, chunk=chunk, budget=40, on_step=preempt_now_and_then(driver) if preempts else None)
    for index, prompt in enumerate(prompts):
        found = driver.requests[f"r{index}"].prompt_logprobs
        if index == 3:
            assert found == []
            continue
        expected = reference_logprobs(reference, prompt)
        assert len(found) == len(prompt) - 1
        for position, logprobs in enumerate(found):
            assert_position_is(logprobs, expected[position], prompt[position + 1], index)


def test_prompt_logprobs_are_computed_in_pieces(models, prompts, monkeypatch):
    def run():
        driver = make_driver(models["float32"])
        driver.add("r", prompts[4], SamplingParams(temperature=0.0, prompt_logprobs=2))
        driver.run(1)
        return driver.requests["r"].prompt_logprobs

    whole = run()
    monkeypatch.setattr("quire.kernels.bounds.PROMPT_LOGITS", 7 * 384)
    pieces = run()
    assert [p.token_ids for p in pieces] == [p.token_ids for p in whole]
    for piece, position in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(piece.logprobs, position.logprobs, atol=1e-5)


def test_output_logprobs_are_those_of_transformers(models, reference, prompts):
    driver = make_driver(models["float32"])
    params = SamplingParams(seed=4, temperature=1.5, repetition_penalty=1.3, logprobs=3)
    add_all(driver, prompts, params)
    driver.run(8, chunk=30)
    for request in driver.requests.values():
        expected = reference_logprobs(reference, request.prompt + request.output)
        assert len(request.logprobs) == 8
        for index, (found, token) in enumerate(zip(request.logprobs, request.output, strict=True)):
            assert_position_is(found, expected[len(request.prompt) + index - 1], token, 3)


def test_only_rows_that_sample_reach_the_output_layer(models, prompts, monkeypatch):
    num_rows = []
    model = models["float32"]
    logits = model.logits
    driver = make_driver(model)
    monkeypatch.setattr(model, "logits", lambda hidden, _: num_rows.append(len(hidden)) or logits(hidden))
    add_all(driver, prompts[2:], GREEDY)
    driver.step({"r0": 5})
    assert num_rows == []
    driver.step({"r0": 12, "r1": 39, "r2": 61})
    assert num_rows == [2]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, seed=3, top_k=2, min_p=0.1),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={5: 3.0}),
        SamplingParams(temperature=0.0, bad_words_token_ids=((7,),)),
    ],
    ids=["greedy", "sampled", "filtered", "logprobs", "penalties", "bad words"],
)
def test_a_damaged_cache_ends_the_requests_that_read_it_and_no_other(models, prompts, greedy_tokens, params):
    driver = make_driver(models["float32"])
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, params if index == 2 else GREEDY)
    everyone = {f"r{index}": len(prompt) for index, prompt in enumerate(prompts)}
    driver.step(everyone)
    with torch.inference_mode():
        driver.kv_cache.tensor[driver.requests["r2"].blocks[0]] = float("nan")
    result = driver.step(dict.fromkeys(everyone, 1))
    assert list(result.errors) == ["r2"]
    assert "the model produced NaN logits" in result.errors["r2"]
    assert result.sampled_token_ids[2, 0] == NO_TOKEN
    driver.finish("r2")
    del everyone["r2"], driver.requests["r2"]
    driver.run(NUM_OUTPUT)
    assert outputs(driver) == [tokens for index, tokens in enumerate(greedy_tokens) if index != 2]


def test_a_step_planned_before_an_error_was_known_still_runs(models):
    driver = make_driver(models["float32"])
    driver.add("r", [4, 5, 6], GREEDY)
    driver.step({"r": 2})
    request = driver.requests["r"]
    with torch.inference_mode():
        driver.kv_cache.tensor[request.blocks[0]] = float("nan")
    assert list(driver.step({"r": 1}).errors) == ["r"]
    result = driver.runner.execute(plan([request.slot], [1], [3], ["r"], known=[4]))
    assert list(result.errors) == ["r"]


def test_damage_in_the_prompt_ends_a_request_that_wants_prompt_logprobs(models, prompts):
    driver = make_driver(models["float32"])
    driver.add("r", prompts[4], SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.add("other", prompts[3], GREEDY)
    driver.step({"r": 10, "other": 40})
    with torch.inference_mode():
        driver.kv_cache.tensor[driver.requests["r"].blocks[0]] = float("nan")
    result = driver.step({"r": 10, "other": 1})
    assert list(result.errors) == ["r"]
    assert "r" not in result.prompt_logprobs
    planned_before = driver.step({"r": 10, "other": 1})
    assert list(planned_before.errors) == ["r"]
    assert "r" not in planned_before.prompt_logprobs


def test_a_request_may_run_to_the_last_token_of_the_model(models):
    driver = make_driver(models["float32"])
    driver.add("r", [5] * (MAX_MODEL_LEN - 3), GREEDY)
    driver.step({"r": MAX_MODEL_LEN - 3})
    for _ in range(3):
        driver.step({"r": 1})
    assert len(driver.requests["r"].output) == 4  # the last is at index max_model_len: never computed
    with pytest.raises(ValueError, match="max_model_len is 128"):
        driver.step({"r": 1})


def test_a_step_without_tokens_applies_the_changes(models, prompts):
    driver = make_driver(models["float32"])
    add_all(driver, prompts, GREEDY)
    driver.step({"r0": 1, "r1": 3})
    driver.preempt("r0")
    driver.finish("r1")
    result = driver.step({})
    assert result.request_ids == []
    assert result.sampled_token_ids.shape == (0, 1)
    assert driver.runner.num_requests == 1
    driver.finish("r0")
    driver.step({})
    assert driver.runner.num_requests == 0


def test_a_token_sampled_while_its_request_was_preempted_is_void(models, prompts, greedy_tokens):
    driver = make_driver(models["float32"])
    driver.add("r", prompts[2], GREEDY)
    driver.step({"r": len(prompts[2])})
    driver.step({"r": 1})
    request = driver.requests["r"]
    assert request.output.pop() == greedy_tokens[2][1]
    driver.preempt("r")
    driver.run(NUM_OUTPUT)
    assert request.output == greedy_tokens[2]


def test_ends_of_requests_that_were_never_started_or_were_preempted_are_fine(models):
    driver = make_driver(models["float32"])
    driver.runner.execute(plan(finished=["never seen"]))
    driver.add("r", [4, 5, 6], GREEDY)
    driver.step({"r": 3})
    first = driver.requests["r"].output[0]
    driver.preempt("r")
    driver.finish("r")
    driver.add("r", [4, 5, 6], GREEDY)  # the id is free again, in the same step
    driver.step({"r": 3})
    assert driver.requests["r"].output == [first]


def new_request(**changes):
    values = {
        "request_id": "r",
        "slot": 2,
        "prompt_token_ids": int_array([1, 2, 3, 4, 5]),
        "output_token_ids": [],
        "sampling_params": GREEDY,
        "eos_token_ids": (),
        "block_ids": np.array([[7, 8]], dtype=np.int32),
        "num_computed_tokens": 0,
    }
    return NewRequestData(**(values | changes))


def resumed_request(request_id, slot, num_tokens=5):
    return ResumedRequestData(request_id, slot, np.array([[9]], dtype=np.int32), 0, num_tokens, 0)


def fork_of(parent_slot, *, slot=2, num_tokens=5, computed=4):
    return ForkData(slot, parent_slot, np.array([[9, 10]], dtype=np.int32), num_tokens, computed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan([2], [5], [0], ["x"]), "'x' is scheduled in slot 2, which 'r' holds"),
        (plan([3], [5], [0], ["r"]), "slot 3, which no request holds"),
        (plan([99], [5], [0], ["r"]), "slot 99, which no request holds"),
        (plan([2, 2], [1, 1], [0, 1], ["r", "r"]), "each needs one"),
        (plan([2], [6], [0], ["r"], known=[5]), "6 tokens after 0 computed, 0 drafts among them; it has 5 "),
        (plan([2], [3], [2], ["r"], known=[6]), "'r' has 5 tokens here, but 6 in the plan"),
        (plan([2], [1], [4], ["r"], known=[5]), "1 tokens after 4 computed, .* it has 5 tokens, 2 of them"),
        (plan([2], [0], [0], ["r"], known=[5]), "scheduled for 0 tokens"),
        (plan([2], [1], [-1], ["r"], known=[5]), "after -1 computed"),
        (plan([2], [3], [2], ["r"], known=[5], drafts=[[7]]), "3 tokens after 2 computed, 1 drafts"),
        (plan([2], [5], [2], ["r"], known=[5], drafts=[[7]]), "5 tokens after 2 computed, 1 drafts"),
        (plan(new=[new_request(request_id="x")]), "'x' is given slot 2, which 'r' holds"),
        (plan(new=[new_request(request_id="x", slot=8)]), "given slot 8; there are 8"),
        (plan(new=[new_request(request_id="x", prompt_token_ids=int_array([]))]), "has 0 prompt tokens"),
        (plan(new=[new_request(request_id="x", prompt_token_ids=int_array([1] * 129))]), "129 prompt tokens"),
        (plan(new=[new_request(request_id="x", output_token_ids=[1] * 124)]), "5 prompt tokens and 129 in"),
        (plan(new=[new_request(request_id="x", slot=3, block_ids=np.array([[50]]))]), "has blocks 0 to 49"),
        (
            plan(new=[new_request(request_id="x", slot=3, block_ids=np.arange(34)[None])]),
            "a block table of 34",
        ),
        (plan(blocks=[(2, 33, 4)]), "a block table of 34"),
        (plan(blocks=[(2, 2, -1)]), "block ids from -1"),
        (plan(resumed=[resumed_request("x", 4)]), "'x' is resumed, but the runner does not know it"),
        (plan(resumed=[resumed_request("r", 4)]), "'r' is resumed, but it is running in slot 2"),
        (plan(preempted=["r"], resumed=[resumed_request("r", 4, num_tokens=4)]), "resumed with 4 tokens"),
        (plan(preempted=["r"], resumed=[resumed_request("r", 4, num_tokens=6)]), "and 5 are known"),
        (plan(forks=[fork_of(2, slot=3)]), "slot 3 is empty"),
        (plan(forks=[fork_of(2, num_tokens=4)]), "whose prompt has 5 tokens, is to continue from 4 tokens"),
        (plan(forks=[fork_of(2, num_tokens=6)]), "from 6 tokens of slot 2, which has 5"),
    ],
)
def test_a_plan_that_contradicts_the_rows_is_refused(models, wrong, message):
    runner = make_driver(models["float32"], num_blocks=50).runner
    runner.execute(plan([2], [2], [0], ["r"], known=[5], new=[new_request()]))
    with pytest.raises(ValueError, match=message):
        runner.execute(wrong)


def test_too_few_blocks_for_the_tokens_are_refused(models):
    runner = make_driver(models["float32"]).runner
    new = new_request(block_ids=np.array([[7]], dtype=np.int32))
    with pytest.raises(ValueError, match="1 blocks of 4"):
        runner.execute(plan([2], [5], [0], ["r"], new=[new]))


def test_prompt_logprobs_out_of_a_cache_are_refused(models):
    driver = make_driver(models["float32"])
    with torch.inference_mode():
        driver.kv_cache.tensor.zero_()
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    for index, cached in enumerate((1, 4)):
        new = new_request(
            request_id=str(index), slot=index, sampling_params=params, num_computed_tokens=cached
        )
        with pytest.raises(ValueError, match="its prompt must not come from a cache"):
            driver.runner.execute(plan([index], [1], [cached], [str(index)], known=[5], new=[new]))
