import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_driver import add_all, int_array, make_driver, plan

from host_choice import HostSampler
from quire.execution.sampling.constraints import RowMasks
from quire.execution.sampling.positions import SamplingPositions
from quire.kernels.cpu.sampling import NativeScans
from quire.kernels.sampling.host_choice import change_logits
from quire.kernels.sampling.token_choice import LogitChanges, LogitMasks
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, GrammarOutput


def bitmask_of(allowed_sets, vocab_size):
    """Bitmask rows by plain arithmetic."""
    rows = []
    for allowed in allowed_sets:
        words = [0] * -(-vocab_size // 32)
        for token in allowed:
            words[token // 32] |= 1 << token % 32
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return int_array(rows).reshape(len(rows), -1)


def grammar_of(allowed_by_request, vocab_size):
    """A GrammarOutput from {request id: [set of token ids per place]}."""
    flat = [allowed for sets in allowed_by_request.values() for allowed in sets]
    return GrammarOutput(
        list(allowed_by_request),
        int_array([len(sets) for sets in allowed_by_request.values()]),
        bitmask_of(flat, vocab_size),
    )


def apply(masks, logits, row):
    """Forbid what the mask of a row does not allow, in the logits of that row."""
    change_logits(logits[None], LogitChanges(LogitMasks(masks.bitmask, masks.mask_of_row[row : row + 1])))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_a_mask_leaves_what_it_allows(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for mask_size in {vocab_size, 32 * (vocab_size // 32) or 32, vocab_size + 40}:
        allowed = {int(token) for token in rng.integers(0, mask_size, 20)}
        masks = RowMasks(bitmask_of([allowed], mask_size), np.array([-1, 0]))
        assert masks.is_masked.tolist() == [False, True]
        logits = np.arange(vocab_size, dtype=np.float32)
        apply(masks, logits, 1)
        assert set(np.flatnonzero(logits >= 0).tolist()) == {t for t in allowed if t < vocab_size}


def test_masks_find_the_places_of_their_requests():
    output = plan(
        range(4), [3, 4, 1, 2], [0, 0, 5, 0], list("abcd"), known=[1, 9, 6, 1], drafts=[[1, 2], [], [], [3]]
    )
    places = SamplingPositions.of(output)  # a: 3, b: none, c: 1, d: 2
    grammar = grammar_of({"d": [{1}, {2}], "b": [{9}], "a": [{3}, {4}, {5}], "gone": [{6}]}, 32)
    masks = RowMasks.of(grammar, output, places)
    assert masks.is_masked.tolist() == [True, True, True, False, True, True]
    found = []
    for place in (0, 1, 2, 4, 5):
        logits = np.zeros(32, dtype=np.float32)
        apply(masks, logits, place)
        found.append(np.flatnonzero(logits == 0).tolist())
    assert found == [[3], [4], [5], [1], [2]]
    with pytest.raises(ValueError, match="'a' samples 3 tokens, but its grammar has 2 masks"):
        RowMasks.of(grammar_of({"a": [{1}, {2}]}, 32), output, places)


def sample(logits, params, allowed, *, prompt=(1, 2), output=(3,)):
    """Sample one row with a mask, or without one for None."""
    sampler = HostSampler(1, len(logits), NativeScans())
    known = int_array([*prompt, *output])
    sampler.table.write(0, params, num_prompt_tokens=len(prompt), eos_token_ids=(4,))
    masks = None
    if allowed is not None:
        masks = RowMasks(bitmask_of([allowed], len(logits)), np.array([0]))
    return sampler.sample_known(
        torch.from_numpy(logits[None].copy()), np.array([0]), np.array([len(known)]), known[None], masks
    )


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1000),
    allowed=st.sets(st.integers(0, 39), min_size=1),
    temperature=st.sampled_from([0.0, 0.5, 3.0]),
    top_k=st.sampled_from([0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
)
def test_a_masked_row_samples_as_if_the_rest_of_the_vocabulary_were_banned(seed, allowed, **features):
    logits = np.random.default_rng(seed).normal(size=40).astype(np.float32) * 3
    params = SamplingParams(seed=seed, logprobs=2, **features)
    banned = tuple((token,) for token in range(40) if token not in allowed)
    expected = sample(
        logits, SamplingParams(seed=seed, logprobs=2, bad_words_token_ids=banned, **features), None
    )
    found = sample(logits, params, allowed)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.token_ids[0] in allowed
    assert found.logprobs == expected.logprobs  # those of the raw distribution
    assert not found.errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("allowed", "constraint"),
    [
        (set(), {}),
        ({4, 5}, {"min_tokens": 9, "stop_token_ids": (5,)}),
        ({6}, {"bad_words_token_ids": ((6,),)}),
    ],
)
def test_a_grammar_that_leaves_nothing_is_an_error_of_its_request(temperature, allowed, constraint):
    logits = np.arange(40, dtype=np.float32)
    result = sample(
        logits, SamplingParams(seed=1, temperature=temperature, logprobs=1, **constraint), allowed
    )
    assert result.token_ids.tolist() == [NO_TOKEN]
    assert "leave no token to choose" in result.errors[0]
    assert result.error_params == {0: "structured_outputs"}
    assert not result.logprobs


def test_allowed_tokens_that_are_banned_are_an_error_that_names_them():
    params = SamplingParams(seed=1, allowed_token_ids=(6,), bad_words_token_ids=((6,),))
    result = sample(np.arange(40, dtype=np.float32), params, None)
    assert result.token_ids.tolist() == [NO_TOKEN]
    assert result.error_params == {0: "allowed_token_ids"}


def run_masked(driver, prompts, allowed, drafts_of=None, num_output=12):
    """Decode under masks that depend on the position only; returns the tokens and the steps."""
    add_all(driver, prompts, SamplingParams(temperature=1.5, seed=5))
    requests, steps = driver.requests, 0
    while live := {i: r for i, r in requests.items() if len(r.output) < num_output}:
        drafts = {i: drafts_of(i, r) for i, r in live.items()} if drafts_of else {}
        grammar = grammar_of(
            {
                i: [allowed(len(r.output) + offset) for offset in range(len(drafts.get(i, ())) + 1)]
                for i, r in live.items()
            },
            384,
        )
        driver.step({i: r.remaining for i, r in live.items()}, drafts=drafts, grammar=grammar)
        steps += 1
    return [request.output[:num_output] for request in requests.values()], steps


def test_masks_hold_at_the_places_of_drafts(models, prompts):
    def allowed(number):
        return {number * 7 % 380, number * 11 % 380 + 1, number * 5 % 380 + 2, 300}

    model = models["float32"]
    expected, num_steps = run_masked(make_driver(model), prompts[:3], allowed)
    assert all(token in allowed(number) for row in expected for number, token in enumerate(row))
    assert len({tuple(row) for row in expected}) == 3

    def nearly_right(request_id, request):
        right = expected[int(request_id[1:])][len(request.output) :][:3]
        return [*right, 300] if len(request.output) % 2 else right[:2]

    found, num_steps_with = run_masked(make_driver(model), prompts[:3], allowed, nearly_right)
    assert found == expected
    assert num_steps_with < num_steps
