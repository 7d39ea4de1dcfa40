"""Beam search against transformers, against trying out everything, and against groups written naively."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import make_model
from quire.sampling_params import SamplingParams
from quire.scheduling.beam_search import (
    BeamCandidates,
    BeamSearch,
    Hypothesis,
    assign_places,
    num_candidates,
)
from quire.status import FinishReason
from quire.step import PositionLogprobs

Model = Callable[[list[list[int]]], np.ndarray]
"""Log-probabilities of the token after each of these outputs: [outputs, V]."""


def candidates_of(row: np.ndarray, count: int) -> BeamCandidates:
    order = np.argsort(-row, kind="stable")[:count]
    return BeamCandidates(order.tolist(), row[order].tolist())


def search(params: SamplingParams, model: Model, *, eos=(), max_tokens: int) -> list[Hypothesis]:
    """Drive a search as an engine would, with a copy of each place's tokens kept by the steps alone."""
    beams = BeamSearch(params, eos_token_ids=eos, max_tokens=max_tokens)
    count = num_candidates(params, eos)
    outputs: dict[int, list[int]] = {0: []}
    while outputs:
        assert beams.live_places == sorted(outputs)
        assert all(beams.output_token_ids(place) == output for place, output in outputs.items())
        rows = model(list(outputs.values()))
        step = beams.advance(
            {place: candidates_of(row, count) for place, row in zip(outputs, rows, strict=True)}
        )
        places = [one.place for one in step.continuations]
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(params.beam_width))
        parents = {one.parent for one in step.continuations}
        assert parents <= set(places), "one child of each stays where it was"
        assert set(step.emptied_places) == set(outputs) - set(places)
        assert step.ends_search == (not places)
        outputs = {one.place: [*outputs[one.parent], one.token_id] for one in step.continuations}
    return beams.hypotheses()


def table_model(seed: int, vocab_size: int, spread: float = 2.0) -> Model:
    """A language model without a model: random log-probabilities that depend on all tokens so far."""

    def logprobs(outputs: list[list[int]]) -> np.ndarray:
        logits = np.array(
            [np.random.default_rng([seed, *output]).normal(size=vocab_size) for output in outputs]
        )
        return logits * spread - np.log(np.exp(logits * spread).sum(axis=1, keepdims=True))

    return logprobs


# -- transformers ------------------------------------------------------------------------------------------


ENDING = [2, 61, 130, 200, 11, 340]
PROMPTS = [[5, 17, 40, 8], [300, 12], [77, 78, 79, 80, 81, 82, 83], [201, 4, 4, 90, 17]]


@pytest.fixture(scope="module")
def transformer():
    """A model that ends often, so that hypotheses of many lengths compete."""
    model = make_model("llama", seed=3, num_hidden_layers=1)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    model.lm_head.bias.data[ENDING] = 2.0
    return model


def transformers_search(model, prompt, *, eos, max_tokens, width, n, **settings):
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=n,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    sequences = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in sequences]
    tokens = [row[:end] for row, end in zip(sequences, ends, strict=True)]
    return tokens, found.sequences_scores.tolist()


EARLY_STOPPING = {"early": True, "heuristic": False, "never": "never"}


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("stop_criteria", EARLY_STOPPING)
@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "min_tokens"),
    [(2, 1, 1.0, 0), (3, 3, 1.0, 0), (4, 4, 0.0, 0), (5, 3, 2.5, 4), (3, 3, -1.0, 0)],
)
def test_equals_transformers(transformer, prompt, stop_criteria, width, n, length_penalty, min_tokens):
    max_tokens = 14

    def model(outputs):
        with torch.no_grad():
            logits = transformer(torch.tensor([prompt + output for output in outputs])).logits[:, -1]
        return torch.log_softmax(logits.float(), dim=-1).numpy()

    params = SamplingParams(
        beam_width=width,
        n=n,
        length_penalty=length_penalty,
        stop_criteria=stop_criteria,
        min_tokens=min_tokens,
    )
    hypotheses = search(params, model, eos=ENDING, max_tokens=max_tokens)
    tokens, scores = transformers_search(
        transformer,
        prompt,
        eos=ENDING,
        max_tokens=max_tokens,
        width=width,
        n=n,
        length_penalty=length_penalty,
        early_stopping=EARLY_STOPPING[stop_criteria],
        min_new_tokens=min_tokens or None,
    )
    assert [one.token_ids for one in hypotheses] == tokens
    assert [one.score for one in hypotheses] == pytest.approx(scores, rel=1e-4)


def test_the_comparison_tells_the_criteria_apart(transformer):
    settings = {"eos": ENDING, "max_tokens": 14, "width": 3, "n": 3, "length_penalty": 1.0}
    found = [
        [transformers_search(transformer, prompt, early_stopping=rule, **settings) for prompt in PROMPTS]
        for rule in EARLY_STOPPING.values()
    ]
    assert all(one != other for one, other in itertools.combinations(found, 2))


# -- everything tried out ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    min_tokens=st.integers(0, 2),
)
def test_a_wide_enough_search_finds_the_best_of_all(seed, length_penalty, min_tokens):
    """With 3 tokens, of which one ends, 4 beams hold all continuations of 2 tokens that go on."""
    end, max_tokens, model = 0, 3, table_model(seed, 3)
    params = SamplingParams(
        beam_width=4, n=4, length_penalty=length_penalty, stop_criteria="never", min_tokens=min_tokens
    )
    everything = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(3), repeat=length):
            is_whole = tokens[-1] == end or length == max_tokens
            if end in tokens[:-1] or not is_whole or (tokens[-1] == end and length <= min_tokens):
                continue
            logprob = sum(model([list(tokens[:i])])[0, token] for i, token in enumerate(tokens))
            everything.append((logprob / length**length_penalty, logprob, list(tokens)))
    score, logprob, tokens = max(everything)
    best = search(params, model, eos=[end], max_tokens=max_tokens)[0]
    assert best.token_ids == tokens
    assert (best.score, best.cumulative_logprob) == (pytest.approx(score), pytest.approx(logprob))


# -- groups ------------------------------------------------------------------------------------------------


def naive_groups(model, vocab_size, *, groups, size, penalty, length_penalty, end, max_tokens, n):
    """Diverse beam search over the whole vocabulary at once, stopping when each group has enough."""
    beams = [{(): 0.0} for _ in range(groups)]
    done: list[dict[tuple[int, ...], float]] = [{} for _ in range(groups)]
    for length in range(1, max_tokens + 1):
        used = np.zeros(vocab_size)
        for group in range(groups):
            if not beams[group]:
                continue
            scores = {
                (*tokens, token): total + row[token] - penalty * used[token]
                for tokens, total in beams[group].items()
                for row in model([list(tokens)])
                for token in range(vocab_size)
            }
            order = sorted(scores, key=scores.__getitem__, reverse=True)
            top = order[:size]
            for tokens in top:
                if tokens[-1] == end or length == max_tokens:
                    done[group][tokens] = scores[tokens] / length**length_penalty
            kept = sorted(done[group], key=done[group].__getitem__, reverse=True)[:size]
            done[group] = {tokens: done[group][tokens] for tokens in kept}
            alive = [] if length == max_tokens else [tokens for tokens in order if tokens[-1] != end][:size]
            for tokens in alive or top:
                used[tokens[-1]] += 1
            beams[group] = {} if len(kept) == size else {tokens: scores[tokens] for tokens in alive}
    merged = [(score, tokens) for group in done for tokens, score in group.items()]
    return sorted(merged, key=lambda item: item[0], reverse=True)[:n]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 4),
    size=st.integers(1, 2),
    penalty=st.sampled_from([0.0, 0.3, 1.5, 50.0]),
    length_penalty=st.sampled_from([0.0, 1.0]),
)
def test_groups_equal_the_naive_ones(seed, groups, size, penalty, length_penalty):
    width = groups * size
    if width < 2 or (groups == 1 and penalty):
        return
    vocab_size, end, max_tokens = 12, 4, 5
    model = table_model(seed, vocab_size)
    params = SamplingParams(
        beam_width=width,
        n=width,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        length_penalty=length_penalty,
        stop_criteria="early",
    )
    found = search(params, model, eos=[end], max_tokens=max_tokens)
    expected = naive_groups(
        model,
        vocab_size,
        groups=groups,
        size=size,
        penalty=penalty,
        length_penalty=length_penalty,
        end=end,
        max_tokens=max_tokens,
        n=width,
    )
    assert sorted((round(one.score, 9), tuple(one.token_ids)) for one in found) == sorted(
        (round(score, 9), tokens) for score, tokens in expected
    )
    for one in found:
        steps = [model([one.token_ids[:i]])[0, token] for i, token in enumerate(one.token_ids)]
        assert one.cumulative_logprob == pytest.approx(sum(steps)), "without the penalties"


def test_a_high_diversity_penalty_makes_groups_begin_differently():
    params = SamplingParams(beam_width=4, n=4, num_beam_groups=4, diversity_penalty=50.0)
    found = search(params, table_model(1, 20), max_tokens=3)
    assert len({one.token_ids[0] for one in found}) == 4


# -- ends --------------------------------------------------------------------------------------------------


def steady_model(*logprobs: float) -> Model:
    return lambda outputs: np.array([logprobs] * len(outputs))


def test_says_why_each_hypothesis_ended():
    params = SamplingParams(
        beam_width=3, n=3, stop_token_ids=(1, 2), stop_criteria="never", length_penalty=0.0
    )
    found = search(params, steady_model(-1.0, -1.5, -2.0, -1.1), eos=[2], max_tokens=2)
    assert [(one.token_ids, one.finish_reason, one.stop_reason) for one in found] == [
        ([1], FinishReason.STOP, 1),
        ([0, 0], FinishReason.LENGTH, None),
        ([0, 3], FinishReason.LENGTH, None),
    ]


def test_the_models_own_end_is_no_stop_reason_unless_ignored():
    for ignore_eos, stop_reason in ((False, None), (True, 2)):
        params = SamplingParams(beam_width=2, stop_token_ids=(2,), ignore_eos=ignore_eos)
        found = search(params, steady_model(-3.0, -3.0, -0.1), eos=[2], max_tokens=4)
        assert (found[0].token_ids, found[0].stop_reason) == ([2], stop_reason)


def test_end_of_sequence_is_a_token_like_others_if_ignored():
    params = SamplingParams(beam_width=2, ignore_eos=True)
    found = search(params, steady_model(-3.0, -3.0, -0.1), eos=[2], max_tokens=4)
    assert (found[0].token_ids, found[0].finish_reason) == ([2, 2, 2, 2], FinishReason.LENGTH)


def test_never_looks_at_the_present_length_where_length_is_a_cost():
    def ends_late(outputs):
        end = -0.1 if len(outputs[0]) == 2 else -1.0
        return np.array([[end, -0.2, -5.0, -6.0]] * len(outputs))

    params = SamplingParams(beam_width=2, n=2, length_penalty=-1.0, stop_criteria="never")
    found = search(params, ends_late, eos=[0], max_tokens=10)
    assert [one.token_ids for one in found] == [[0], [1, 1, 0]]
    assert [one.score for one in found] == pytest.approx([-1.0, -0.5 * 3])


def test_a_search_without_possible_tokens_ends_with_what_there_is():
    impossible = -np.inf
    params = SamplingParams(beam_width=3, n=3)
    found = search(params, steady_model(-0.1, impossible, impossible), eos=[0], max_tokens=5)
    assert [one.token_ids for one in found] == [[0]]


# -- places ------------------------------------------------------------------------------------------------


@given(st.data())
def test_places(data):
    num_places = data.draw(st.integers(1, 10))
    parents = data.draw(st.lists(st.integers(0, num_places - 1), max_size=num_places))
    places = assign_places(parents, num_places)
    assert len(set(places)) == len(places) == len(parents)
    assert set(places) <= set(range(num_places))
    num_stayed = sum(place == parent for place, parent in zip(places, parents, strict=True))
    assert num_stayed == len(set(parents)), "as few copies as can be"


def test_dead_beams_leave_their_places_to_the_others():
    assert assign_places([2, 2, 0, 2], 4) == [2, 1, 0, 3]


def test_candidates_leave_out_the_chosen_token():
    position = PositionLogprobs(token_ids=[9, 4, 9], logprobs=[-2.0, -0.5, -2.0], ranks=[2, 1, 2])
    assert BeamCandidates.of(position) == BeamCandidates([4, 9], [-0.5, -2.0])


def test_an_empty_place_has_no_output():
    beams = BeamSearch(SamplingParams(beam_width=2), eos_token_ids=(), max_tokens=3)
    with pytest.raises(ValueError, match=r"place 1.*\[0\]"):
        beams.output_token_ids(1)
