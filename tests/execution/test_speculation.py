"""Tokens with drafts are those without, whatever the drafts are."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_driver import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    StepDriver,
    add_all,
    int_array,
    make_driver,
    model_cache,
    outputs,
    plan,
    preempt_now_and_then,
)

from checkpoints import make_checkpoint
from late_tokens import LateCopy, choose_on_device
from quire.execution.device_step import DeviceStep
from quire.execution.drafts.draft_model_proposer import DraftModelProposer
from quire.execution.drafts.ngram_proposer import NgramProposer
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, NewRequestData

NUM_OUTPUT = 20
GREEDY = SamplingParams(temperature=0.0)
VOCAB_SIZE = 384

KINDS_OF_PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7, logprobs=0),
    SamplingParams(seed=1, temperature=1.3, logprobs=3, prompt_logprobs=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, presence_penalty=1.5),
    SamplingParams(seed=3, temperature=1.0, top_k=5, logit_bias={7: 5.0, 9: 4.0}, frequency_penalty=1.0),
]


def with_constraints(params, output):
    """The same parameters with bans that matter in `output`."""
    return SamplingParams(
        temperature=params.temperature,
        seed=params.seed,
        logprobs=params.logprobs,
        min_tokens=12,
        stop_token_ids=tuple(output[4:6]),
        bad_words_token_ids=((output[1],), tuple(output[6:8]), tuple(output[9:12])),
    )


def run(model, prompts, all_params, *, draft=None, **limits):
    driver = make_driver(model)
    for index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
        driver.add(index, prompt, params)
    number_of_steps = 0

    def count(number):
        nonlocal number_of_steps
        number_of_steps = number

    driver.run(NUM_OUTPUT, on_step=limits.pop("on_step", lambda driver: count)(driver), draft=draft, **limits)
    found = {
        index: (r.output[:NUM_OUTPUT], r.logprobs[:NUM_OUTPUT], r.prompt_logprobs)
        for index, r in driver.requests.items()
    }
    return found, number_of_steps


def drafts_of(expected, kind, seed):
    """A function that makes drafts of one kind, knowing the tokens that will come."""
    rng = np.random.default_rng(seed)

    def draft(index, request):
        right = expected[index][0][len(request.output) :]
        count = int(rng.integers(0, 6))
        wrong = rng.integers(3, 380, count).tolist()
        if kind == "perfect":
            return right[:5]
        if kind == "random" or not right:
            return wrong
        num_right = int(rng.integers(0, min(count, len(right)) + 1))
        mixed = right[:num_right] + wrong[num_right:]
        if num_right < count and num_right < len(right):
            mixed[num_right] = (right[num_right] + 1) % VOCAB_SIZE  # the first wrong one; then again right
            mixed[num_right + 1 :] = right[num_right + 1 : count]
        return mixed

    return draft


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("constrained", [False, True])
def test_tokens_and_logprobs_are_those_without_drafts(models, prompts, dtype, constrained):
    model, all_params = models[dtype], KINDS_OF_PARAMS
    expected, num_steps = run(model, prompts, all_params)
    if constrained:
        outputs_without = [expected[index][0] for index in range(len(prompts))]
        all_params = list(map(with_constraints, all_params, outputs_without))
        expected, num_steps = run(model, prompts, all_params)
        assert [expected[index][0] for index in range(len(prompts))] != outputs_without
    for kind in ("perfect", "random", "mixed"):
        draft = drafts_of(expected, kind, seed=len(kind))
        found, num_steps_with = run(model, prompts, all_params, draft=draft)
        assert found == expected, kind
        assert num_steps_with == (4 if kind == "perfect" else num_steps_with)  # 20 tokens, 6 a step
        assert num_steps_with <= num_steps
        draft = drafts_of(expected, kind, seed=0)
        found, _ = run(
            model, prompts, all_params, draft=draft, chunk=9, budget=20, on_step=preempt_now_and_then
        )
        assert found == expected, kind


def test_drafts_may_reach_the_last_place_of_the_model(models):
    model = models["float32"]
    prompt = [5] * (MAX_MODEL_LEN - 6)
    plain = make_driver(model)
    plain.add("r", prompt, GREEDY)
    plain.run(7)
    expected = plain.requests["r"].output
    for right in (6, 3, 0):
        driver = make_driver(model)
        driver.add("r", prompt, GREEDY)
        driver.step({"r": len(prompt)})
        drafts = expected[1 : 1 + right] + [3] * (5 - right)
        driver.step({"r": 1}, drafts={"r": drafts[:5]})
        driver.run(7)
        assert driver.requests["r"].output == expected


def test_a_request_that_fails_emits_nothing_and_spares_the_others(models, prompts):
    driver = make_driver(models["float32"])
    add_all(driver, prompts[2:4], GREEDY)
    driver.step({"r0": 17, "r1": 40})
    with torch.inference_mode():
        driver.kv_cache.tensor[driver.requests["r0"].blocks[0]] = float("nan")
    result = driver.step({"r0": 1, "r1": 1}, drafts={"r0": [5, 6], "r1": [7]})
    assert list(result.errors) == ["r0"]
    assert result.sampled_token_ids[0].tolist() == [NO_TOKEN] * 3
    assert len(driver.requests["r1"].output) >= 2


def test_an_error_behind_a_rejected_draft_is_void_and_one_behind_an_accepted_is_found_again(
    models, prompts, monkeypatch
):
    model = models["float32"]
    plain = make_driver(model)
    plain.add("r", prompts[2], GREEDY)
    plain.run(4)
    expected = plain.requests["r"].output
    logits = model.logits

    def broken_at_the_last_place(hidden, num_largest):
        rows = logits(hidden, num_largest)
        rows[-1] = float("nan")
        return rows

    def step_with(drafts):
        driver = make_driver(model)
        driver.add("r", prompts[2], GREEDY)
        driver.step({"r": 17})
        with monkeypatch.context() as patched:
            patched.setattr(model, "logits", broken_at_the_last_place)
            return driver.step({"r": 1}, drafts={"r": drafts}), driver

    result, _ = step_with([expected[1], (expected[2] + 1) % VOCAB_SIZE])
    assert result.sampled_token_ids.tolist() == [[*expected[1:3], NO_TOKEN]]
    assert not result.errors
    result, driver = step_with(expected[1:3])
    assert result.sampled_token_ids.tolist() == [[*expected[1:3], NO_TOKEN]]
    assert not result.errors
    driver.step({"r": 1})
    assert driver.requests["r"].output == expected


# -- proposers -----------------------------------------------------------------------------------------------


class ProposingDriver(StepDriver):
    """Verifies in each step what the step before has proposed."""

    @classmethod
    def of(cls, model, proposer, **options):
        driver = make_driver(model, proposer=proposer, **options)
        driver.__class__ = cls
        driver.proposed, driver.num_drafts, driver.num_accepted, driver.number_of_steps = {}, 0, 0, 0
        return driver

    def step(self, num_tokens, *, drafts=None, **others):
        before = {request_id: len(self.requests[request_id].output) for request_id in num_tokens}
        result = super().step(num_tokens, drafts=drafts, num_drafts_wanted=4, **others)
        drafts_now = result.draft_token_ids
        if drafts_now is None:
            drafts_now = np.full((len(num_tokens), 4), NO_TOKEN)
        assert drafts_now.shape == (len(num_tokens), 4)
        for row, request_id in enumerate(num_tokens):
            emitted = len(self.requests[request_id].output) - before[request_id]
            self.num_drafts += len((drafts or {}).get(request_id, ()))
            self.num_accepted += max(0, emitted - 1)
            proposed = drafts_now[row]
            self.proposed[request_id] = proposed[proposed != NO_TOKEN].tolist()
            assert emitted or not self.proposed[request_id]
        self.number_of_steps += 1
        return result

    def run_proposing(self, **limits):
        self.run(NUM_OUTPUT, draft=lambda request_id, _: self.proposed.get(request_id, []), **limits)


def trimmed(driver):
    return [output[:NUM_OUTPUT] for output in outputs(driver)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_model_that_is_the_model_itself_is_always_right(models, prompts, dtype):
    model = models[dtype]
    plain = make_driver(model)
    add_all(plain, prompts, GREEDY)
    plain.run(NUM_OUTPUT)
    cache = model_cache(model)
    driver = ProposingDriver.of(model, DraftModelProposer(model, cache))
    with torch.inference_mode():
        cache.tensor.fill_(float("nan"))
    add_all(driver, prompts, GREEDY)
    driver.run_proposing()
    assert trimmed(driver) == outputs(plain)
    assert driver.num_accepted == driver.num_drafts > 40
    assert driver.number_of_steps <= 12


def test_a_draft_model_survives_preemption_and_chunks(models, prompts):
    model = models["float32"]
    plain = make_driver(model)
    add_all(plain, prompts, GREEDY)
    plain.run(NUM_OUTPUT)
    cache = model_cache(model)
    driver = ProposingDriver.of(model, DraftModelProposer(model, cache), seed=3, max_num_seqs=4)
    add_all(driver, prompts, GREEDY)
    with torch.inference_mode():
        cache.tensor.fill_(float("nan"))
    driver.run_proposing(chunk=9, budget=23, on_step=preempt_now_and_then(driver))
    assert trimmed(driver) == outputs(plain)


def test_a_draft_model_of_another_family_changes_no_token(models, prompts, tmp_path):
    path = make_checkpoint("gemma3", tmp_path, dtype="float32")
    draft = load_decoder(path, read_model_config(path), "float32")
    params = [SamplingParams(seed=index, temperature=0.8, logprobs=1) for index in range(len(prompts))]
    model = models["float32"]
    assert draft.config.vocab_size == model.config.vocab_size
    expected, _ = run(model, prompts, params)
    driver = ProposingDriver.of(model, DraftModelProposer(draft, model_cache(draft)))
    for index, prompt in enumerate(prompts):
        driver.add(index, prompt, params[index])
    driver.run_proposing()
    assert trimmed(driver) == [output for output, _, _ in expected.values()]
    assert driver.num_drafts > 0


def with_vocabulary(path, vocab_size):
    """The float32 model at `path` with fewer token ids, or more: one of these is always the likeliest."""
    weights = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name][:vocab_size]
        direction = torch.full((1, rows.shape[1]), 1e3)
        added = torch.cat([direction, -direction])[: vocab_size - len(rows)]
        weights[name] = torch.cat([rows, added])
    save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return load_decoder(path, read_model_config(path), "float32")


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=5, temperature=0.8)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft_size", [300, VOCAB_SIZE + 2])
def test_a_draft_model_with_fewer_or_more_token_ids_changes_no_token(
    models, prompts, params, draft_size, tmp_path
):
    """The model itself drafts: some ids of the prompts it lacks, or likelier ones it alone has."""
    model = models["float32"]
    plain = make_driver(model)
    add_all(plain, prompts, params)
    plain.run(NUM_OUTPUT)
    draft = with_vocabulary(make_checkpoint("qwen3", tmp_path, dtype="float32"), draft_size)
    assert max(map(max, prompts)) >= 300
    proposer = DraftModelProposer(draft, model_cache(draft), vocab_size=VOCAB_SIZE)
    driver = ProposingDriver.of(model, proposer)
    add_all(driver, prompts, params)
    driver.run_proposing()
    assert trimmed(driver) == outputs(plain)
    assert driver.num_drafts > 40
    if params is GREEDY and draft_size > VOCAB_SIZE:
        assert driver.num_accepted == driver.num_drafts


def test_a_draft_model_proposes_nothing_from_unsound_logits_or_past_its_blocks(models, prompts):
    model = models["float32"]
    cache = model_cache(model)
    driver = ProposingDriver.of(model, DraftModelProposer(model, cache))
    add_all(driver, prompts[2:4], GREEDY)
    driver.step({"r0": 17, "r1": 40})
    assert BLOCK_SIZE == 4
    assert len(driver.proposed["r0"]) == 20 - 17  # five blocks
    assert len(driver.proposed["r1"]) == 0
    with torch.inference_mode():
        cache.tensor[driver.requests["r1"].blocks[0]] = float("nan")
    driver.step({"r0": 1, "r1": 1})
    assert len(driver.proposed["r0"]) == 20 - 18
    assert driver.proposed["r1"] == []


def test_a_draft_model_takes_part_in_block_copies(models, prompts):
    model, prompt = models["float32"], prompts[2]
    plain = make_driver(model)
    plain.add("r", prompt, GREEDY)
    plain.run(6)
    expected = plain.requests["r"].output
    cache = model_cache(model)
    runner = make_driver(model, proposer=DraftModelProposer(model, cache)).runner
    with torch.inference_mode():
        cache.tensor.fill_(float("nan"))

    def new(request_id, slot, output, blocks, computed):
        return NewRequestData(
            request_id, slot, int_array(prompt), output, GREEDY, (), int_array([blocks]), computed
        )

    runner.execute(plan([0], [17], [0], ["a"], new=[new("a", 0, [], range(5), 0)]))
    sharing = new("b", 1, expected[:1], [0, 1, 2, 3, 9], 17)
    result = runner.execute(
        plan([1], [1], [17], ["b"], known=[18], new=[sharing], copies=[[4, 9]], num_drafts_wanted=4)
    )
    assert result.sampled_token_ids.tolist() == [expected[1:2]]
    assert result.draft_token_ids.tolist() == [[*expected[2:4], NO_TOKEN, NO_TOKEN]]  # two places are left


def test_ngram_drafts_speed_up_a_loop_and_change_nothing(models):
    model = models["float32"]
    plain = make_driver(model)
    params = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys((50, 51), 100.0), frequency_penalty=0.2)
    plain.add("r", [50, 51, 50, 51, 50], params)
    plain.run(NUM_OUTPUT)
    driver = ProposingDriver.of(model, NgramProposer(1, 3))
    driver.add("r", [50, 51, 50, 51, 50], params)
    driver.run_proposing()
    assert trimmed(driver) == outputs(plain)
    assert driver.number_of_steps < NUM_OUTPUT


def test_a_proposer_observes_outputs_that_are_known_and_steps_that_are_not_over(models, prompts, monkeypatch):
    class Observer(NgramProposer):
        def begin_step(self, num_tokens, *, is_alone):
            steps.append((num_tokens, is_alone))

        def finish(self, slot, output):
            observed.append(output.tolist())

    observed, steps = [], []
    choose_on_device(monkeypatch)
    monkeypatch.setattr(LateCopy, "has_arrived", property(lambda self: self._is_waited_for))
    driver = make_driver(models["float32"], proposer=Observer(1, 3))
    driver.add("r", prompts[2], GREEDY)
    driver.step({"r": 17})
    slot = driver.requests["r"].slot
    [first] = driver.requests["r"].output
    in_flight = driver.runner.execute(plan([slot], [1], [17], ["r"], known=[18]))
    assert isinstance(in_flight, DeviceStep)
    driver.add("s", prompts[1], GREEDY)
    driver.step({"s": 3})
    driver.runner.execute(plan(finished=["r"]))
    assert observed == [[first]]
    assert steps == [(17, True), (1, True), (3, False)]


def test_drafts_of_a_step_in_flight_are_for_those_who_are_still_there(models, prompts, monkeypatch):
    class Observer(NgramProposer):
        def propose(self, rows, num_drafts):
            observed.append((rows.slots.tolist(), rows.other_slots.tolist(), rows.is_newest))
            return np.tile(rows.token_ids[rows.slots, rows.num_tokens - 1, None], num_drafts)

        def num_idle_steps(self, slots):
            return 10 + slots.astype(np.int32)

    observed = []
    choose_on_device(monkeypatch)
    driver = make_driver(models["float32"], proposer=Observer(1, 3))
    for name, prompt in zip("abcd", prompts[1:5], strict=True):
        driver.add(name, prompt, GREEDY)
    driver.step({name: len(request.prompt) for name, request in driver.requests.items()})
    known = [request.num_known for request in driver.requests.values()]
    slots = [request.slot for request in driver.requests.values()]
    rows = slots, [1] * 4, [number - 1 for number in known], "abcd"
    new_blocks = [
        (request.slot, len(request.blocks), driver.free_blocks.pop()) for request in driver.requests.values()
    ]
    step = plan(*rows, known=known, blocks=new_blocks)
    step = dataclasses.replace(step, num_drafts_wanted=int_array([2, 2, 0, 3]))
    in_flight = driver.runner.execute(step)
    driver.runner.execute(plan(preempted=["b"]))
    driver.runner.execute(plan([slots[2]], [1], [known[2]], ["c"], known=[known[2] + 1]))
    tokens = in_flight.result().sampled_token_ids[:, 0].tolist()
    drafts = in_flight.drafts()
    assert observed == [([slots[0], slots[3]], [slots[2]], False)]
    assert drafts.request_ids == ["a", "c", "d"]
    assert drafts.draft_token_ids == [[tokens[0]] * 3, [NO_TOKEN] * 3, [tokens[3]] * 3]
    assert drafts.num_steps_without_drafts == [10 + slots[0], 10 + slots[2], 10 + slots[3]]


def test_nothing_is_proposed_unless_asked(models, prompts):
    driver = make_driver(models["float32"], proposer=NgramProposer(1, 3))
    add_all(driver, prompts[:2], GREEDY)
    assert driver.step({"r0": 1, "r1": 3}).draft_token_ids is None
    driver = make_driver(models["float32"])
    add_all(driver, prompts[:2], GREEDY)
    assert driver.step({"r0": 1, "r1": 3}, num_drafts_wanted=3).draft_token_ids is None
