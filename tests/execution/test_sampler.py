import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from host_choice import HostSampler
from quire.execution.sampling.rng import uniforms
from quire.kernels.cpu.sampling import NativeScans
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN
from quire.structured_outputs import StructuredOutputsParams
from sampling_reference import adjusted, chosen
from unmutated import UNMUTATED

EOS = (1,)


@dataclasses.dataclass
class Case:
    """One row: its logits, and the request that they are for."""

    logits: np.ndarray
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    @property
    def position(self):
        return len(self.prompt) + len(self.output)


def sampler_of(num_slots, vocab_size):
    return HostSampler(num_slots, vocab_size, NativeScans())


def sample(cases, *, slots=None, sampler=None):
    """Sample the cases as one batch, in rising slots unless told otherwise."""
    slots = np.arange(len(cases)) if slots is None else np.asarray(slots)
    vocab_size = len(cases[0].logits)
    sampler = sampler or sampler_of(int(slots.max()) + 1, vocab_size)
    token_ids = np.full((slots.max() + 1, max(c.position for c in cases) + 3), 77_777, dtype=np.int32)
    for slot, case in zip(slots.tolist(), cases, strict=True):
        token_ids[slot, : case.position] = case.prompt + case.output
        sampler.table.write(slot, case.params, num_prompt_tokens=len(case.prompt), eos_token_ids=EOS)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    positions = np.array([case.position for case in cases])
    return sampler.sample_known(logits, slots, positions, token_ids)


def expected_token(case):
    logits = adjusted(case.logits, case.params, case.prompt, case.output, EOS)
    if np.isneginf(logits).all():
        return int(np.argmax(case.logits))
    seed = np.array([(case.params.seed or 0) % 2**64], dtype=np.uint64)
    return chosen(logits, case.params, uniforms(seed, np.array([case.position]))[0])


def params_strategy(vocab_size):
    token = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 4, 50, 10_000]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.01, 0.3]),
        repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
        presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
        logit_bias=st.dictionaries(token, st.sampled_from([-100.0, -1.0, 3.0, 100.0]), max_size=3),
        bad_words_token_ids=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(
            tuple
        ),
        min_tokens=st.sampled_from([0, 0, 2, 6]),
        stop_token_ids=st.lists(token, max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        seed=st.integers(-(2**63), 2**63 - 1),
        logprobs=st.sampled_from([None, None, 0, 3]),
    )


def cases_strategy(vocab_size, max_size):
    def build(params, seed, num_prompt, num_output):
        rng = np.random.default_rng(seed)
        logits = (np.round(rng.normal(size=vocab_size) * 3 * 16) / 16).astype(np.float32)
        logits[rng.random(vocab_size) < 0.1] = -np.inf
        logits[0] = 0.0
        prompt = rng.integers(0, vocab_size, num_prompt).tolist()
        return Case(logits, params, prompt, rng.integers(0, vocab_size, num_output).tolist())

    case = st.builds(
        build, params_strategy(vocab_size), st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 8)
    )
    return st.lists(case, min_size=1, max_size=max_size)


@settings(max_examples=90, backend=UNMUTATED)
@given(data=st.data(), vocab_size=st.sampled_from([3, 17, 150]))
def test_any_mix_of_parameters_gives_what_the_plain_loop_gives(data, vocab_size):
    cases = data.draw(cases_strategy(vocab_size, 6))
    result = sample(cases)
    assert result.token_ids.tolist() == [expected_token(case) for case in cases]
    assert not result.errors


@settings(max_examples=36, backend=UNMUTATED)
@given(data=st.data(), vocab_size=st.sampled_from([17, 150, 2500]))
def test_a_row_does_not_depend_on_its_company(data, vocab_size):
    cases = data.draw(cases_strategy(vocab_size, 9))
    together = sample(cases)
    order = data.draw(st.permutations(range(len(cases))))
    for index in order:
        alone = sample([cases[index]], slots=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)  # every float to the last bit
    shuffled = sample([cases[index] for index in order])
    assert shuffled.token_ids.tolist() == together.token_ids[list(order)].tolist()


@settings(max_examples=60, backend=UNMUTATED)
@given(data=st.data(), vocab_size=st.sampled_from([17, 300, 5000]), levels=st.sampled_from([1, 16, 2**16]))
def test_a_token_depends_on_as_many_of_the_largest_logits_as_its_request_says(data, vocab_size, levels):
    """With one level of logits, more tokens tie than a head may have."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (np.round(rng.normal(size=vocab_size) * levels) / levels).astype(np.float32)
    params = data.draw(params_strategy(vocab_size))
    params = dataclasses.replace(params, logit_bias={}, bad_words_token_ids=())
    case, sampler = Case(logits, params, [1, 2], [3]), sampler_of(1, vocab_size)
    expected = sample([case], sampler=sampler)
    num_largest = sampler.table.num_largest(np.zeros(1, dtype=np.int64))
    least = -np.inf if num_largest == 0 else np.sort(logits)[-min(num_largest, vocab_size)]
    case.logits = np.where(logits >= least, logits, -np.inf)
    assert sample([case], sampler=sampler).token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.0, "top_k": 50}, 1),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.1}, 20),
        ({"top_k": 128}, 128),
        ({"top_k": 129}, 0),
        ({}, 0),
        ({"temperature": 0.0, "logprobs": 0}, 0),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, 0),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0),
        ({"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="a")}, 0),
    ],
)
def test_how_many_of_the_largest_logits_a_request_needs(options, expected):
    sampler = sampler_of(3, 1000)
    for slot, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(seed=1, **options))):
        sampler.table.write(slot, params, num_prompt_tokens=1, eos_token_ids=EOS)
    assert sampler.table.num_largest(np.array([1])) == expected
    assert sampler.table.num_largest(np.array([0, 1])) == expected
    assert sampler.table.num_largest(np.array([0])) == 1


def one_of_each_feature(vocab_size, seed):
    rng = np.random.default_rng(seed)
    features = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {"logprobs": 20},
        {"temperature": 0.2},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"temperature": 4.0, "top_p": 0.99},
        {"min_p": 0.05},
        {"min_p": 1e-5, "temperature": 2.0},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "logprobs": 2},
        {"frequency_penalty": 1.0, "temperature": 0.0},
        {"logit_bias": {4: 3.0}},
        {"min_tokens": 100},
    ]
    return [
        Case(
            rng.normal(size=vocab_size).astype(np.float32) * 3,
            SamplingParams(seed=seed + index, **feature),
            rng.integers(0, vocab_size, 12).tolist(),
            rng.integers(0, vocab_size, 5).tolist(),
        )
        for index, feature in enumerate(features)
    ]


@pytest.mark.parametrize("vocab_size", [2048, 32_003])
def test_every_feature_alone_and_in_company_at_real_vocabulary_sizes(vocab_size):
    for seed in range(3):
        cases = one_of_each_feature(vocab_size, seed * 100)
        together = sample(cases)
        for index, case in enumerate(cases):
            alone = sample([case], slots=[len(cases) - index])
            assert alone.token_ids[0] == together.token_ids[index], case.params
            assert alone.logprobs.get(0) == together.logprobs.get(index), case.params


def test_a_request_draws_the_same_number_after_a_restart():
    """A continuation carries the output so far in its prompt; the position is what counts."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=300).astype(np.float32)
    params = SamplingParams(seed=-5, temperature=2.0)
    before = sample([Case(logits, params, [1, 2, 3], [4, 5])])
    after = sample([Case(logits, params, [1, 2, 3, 4, 5], [])])
    assert before.token_ids.tolist() == after.token_ids.tolist()
    drawn = {int(sample([Case(logits, params, [1] * n, [])]).token_ids[0]) for n in range(1, 30)}
    assert len(drawn) > 15


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unsound_row_is_an_error_of_that_row_only(value, kind, temperature):
    params = SamplingParams(
        temperature=temperature, seed=1, logprobs=2, repetition_penalty=1.1, logit_bias={0: 1.0}
    )
    rng = np.random.default_rng(0)
    cases = [Case(rng.normal(size=40).astype(np.float32), params, [1, 2], [3]) for _ in range(3)]
    healthy = sample(cases)
    cases[1].logits[:] = cases[1].logits if np.isnan(value) else value
    cases[1].logits[20] = value
    broken = sample(cases)
    assert list(broken.errors) == [1]
    assert broken.errors[1].startswith(f"the model produced {kind} logits")
    assert broken.token_ids[1] == NO_TOKEN
    assert 1 not in broken.logprobs
    for row in (0, 2):
        assert broken.token_ids[row] == healthy.token_ids[row]
        assert broken.logprobs[row] == healthy.logprobs[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_banned_keeps_its_likeliest_token(temperature):
    everything = tuple((token,) for token in range(6))
    params = SamplingParams(temperature=temperature, seed=2, bad_words_token_ids=everything, logprobs=1)
    logits = np.array([0.0, 1.0, 7.0, 2.0, 3.0, 6.0], dtype=np.float32)
    result = sample([Case(logits, params, [1], [])])
    assert result.token_ids.tolist() == [2]
    assert result.logprobs[0].ranks == [1, 1]


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = np.array([1.0, 5.0, 5.0, 5.0], dtype=np.float32)
    assert sample([Case(logits, SamplingParams(temperature=0.0), [1], [])]).token_ids.tolist() == [1]


def test_logprobs_are_of_the_raw_distribution():
    rng = np.random.default_rng(8)
    logits = [(rng.normal(size=500) * 5).astype(np.float32) for _ in range(3)]
    cases = [
        Case(logits[0], SamplingParams(seed=1, logprobs=4, temperature=3.0, top_k=30), [1], []),
        Case(logits[1], SamplingParams(temperature=0.0, logprobs=0), [1], []),
        Case(
            logits[2],
            SamplingParams(temperature=0.0, logprobs=2, logit_bias={int(logits[2].argmin()): 100.0}),
            [1],
            [],
        ),
    ]
    result = sample(cases)
    assert list(result.logprobs) == [0, 1, 2]
    for row, case in enumerate(cases):
        found = result.logprobs[row]
        expected = torch.from_numpy(case.logits).double().log_softmax(dim=-1)
        likeliest = expected.argsort(descending=True, stable=True).tolist()
        token, count = int(result.token_ids[row]), case.params.logprobs
        assert found.token_ids == [token, *likeliest[:count]]
        assert found.ranks == [likeliest.index(token) + 1, *range(1, count + 1)]
        np.testing.assert_allclose(found.logprobs, expected[found.token_ids].numpy(), atol=1e-6)
    assert result.logprobs[2].ranks[0] == 500  # the bias chose the least likely token


def test_ranks_of_equal_logits_go_by_token_id():
    logits = np.array([1.0, 4.0, 4.0, 9.0, 4.0], dtype=np.float32)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 50.0})
    found = sample([Case(logits, params, [1], [])]).logprobs[0]
    assert found.token_ids == [4, 3, 1, 2]
    assert found.ranks == [4, 1, 2, 3]


def test_logprobs_of_a_vocabulary_smaller_than_asked_for():
    params = SamplingParams(temperature=0.0, logprobs=20)
    found = sample([Case(np.array([1.0, 3.0, 2.0], dtype=np.float32), params, [1], [])]).logprobs[0]
    assert found.token_ids == [1, 1, 2, 0]
    assert found.ranks == [1, 1, 2, 3]
    assert len(found.logprobs) == 4


def test_a_slot_forgets_the_request_before():
    rng = np.random.default_rng(9)
    logits = rng.normal(size=64).astype(np.float32)
    sampler = sampler_of(2, 64)
    loaded = SamplingParams(
        seed=3,
        top_k=1,
        repetition_penalty=5.0,
        bad_words_token_ids=((int(logits.argmax()),),),
        logit_bias={3: 100.0},
        min_tokens=50,
        logprobs=1,
    )
    sample([Case(logits, loaded, [3, 4], [5])], sampler=sampler)
    sampler.table.clear(0)
    result = sample([Case(logits, SamplingParams(temperature=0.0), [3, 4], [5])], sampler=sampler)
    assert result.token_ids.tolist() == [int(logits.argmax())]
    assert result.logprobs == {}


def test_sampling_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed is None"):
        sample([Case(np.zeros(4, dtype=np.float32), SamplingParams(), [1], [])])
