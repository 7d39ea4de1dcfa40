import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from host_choice import constrained, penalized
from quire.execution.sampling.constraints import UNTIL_THE_END, Constraints
from quire.sampling_params import SamplingParams
from sampling_reference import adjusted

VOCAB_SIZE = 60


def processors():
    """The logits processors of `transformers`, which takes seconds to import."""
    from transformers.generation import logits_process

    return logits_process


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def random_row(seed=0):
    return (np.random.default_rng(seed).normal(size=VOCAB_SIZE) * 3).astype(np.float32)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    row, prompt, output = random_row(), [3, 4, 4, 59], [7, 7, 3, 0]
    expected = processors().RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), torch.from_numpy(row[None].copy())
    )
    changed = penalized(row, SamplingParams(repetition_penalty=penalty), prompt, output)
    np.testing.assert_allclose(changed, expected[0].numpy(), rtol=1e-6)


def test_presence_and_frequency_count_the_output_only():
    row, prompt, output = random_row(), [5, 6, 6], [6, 8, 8, 8]
    changed = penalized(row, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt, output)
    difference = dict(enumerate((row - changed).round(5).tolist()))
    assert {token: d for token, d in difference.items() if d} == {6: 0.75, 8: 1.25}


def test_without_constraints_nothing_is_kept():
    assert Constraints.of(SamplingParams(), eos_token_ids=(1,), vocab_size=VOCAB_SIZE) is None


def test_constraints_say_until_when_they_matter():
    for params, until in [
        (SamplingParams(min_tokens=4), 4),
        (SamplingParams(min_tokens=4, logit_bias={3: 1.0}), UNTIL_THE_END),
        (SamplingParams(bad_words_token_ids=((3, 4),)), UNTIL_THE_END),
    ]:
        assert Constraints.of(params, eos_token_ids=(1,), vocab_size=VOCAB_SIZE).until == until


@pytest.mark.parametrize("output", [[], [9], [1, 9], [9, 9, 8], [8, 9, 9, 8, 7], [7, 8]])
def test_bad_words_are_those_of_transformers(output):
    sequences = ((5,), (9, 6), (9, 9, 8, 7), (8, 7, 2), (7, 8, 7))
    row = random_row()
    processor = processors().NoBadWordsLogitsProcessor(
        [list(s) for s in sequences], eos_token_id=VOCAB_SIZE - 1
    )
    expected = processor(torch.tensor([output], dtype=torch.int64), torch.from_numpy(row[None].copy()))
    changed = constrained(row, SamplingParams(bad_words_token_ids=sequences), output)
    assert np.array_equal(changed, expected[0].numpy())


TOKENS = st.lists(st.integers(0, 3), max_size=7)


@given(sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8), output=TOKENS)
def test_banned_tokens_are_the_same_before_and_after_the_last_token_is_known(sequences, output):
    # Tokenizers make words of tokens that the vocabulary does not have.
    impossible = (10**6,), (2, 10**6), (10**6, 2)
    params = SamplingParams(bad_words_token_ids=[*map(tuple, sequences), (9,), *impossible])
    constraints = Constraints.of(params, eos_token_ids=(), vocab_size=VOCAB_SIZE)
    expected = {
        tuple(sequence)[-1]
        for sequence in sequences
        if len(sequence) > 1 and output[max(0, len(output) - len(sequence) + 1) :] == sequence[:-1]
    }
    assert set(constraints.banned_completions(ids(output)).tolist()) == expected
    assert set(constraints.edits(0)[1].tolist()) == {9, *(token for token, *more in sequences if not more)}
    if output:
        before, last = constraints.possible_completions(ids(output[:-1]))
        assert set(last[before == output[-1]].tolist()) == expected


def test_bias_is_that_of_transformers():
    row, bias = random_row(), {3: -100.0, 4: 2.5}
    processor = processors().SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(torch.tensor([[1, 2]]), torch.from_numpy(row[None].copy()))
    np.testing.assert_allclose(
        constrained(row, SamplingParams(logit_bias=bias), [1, 2]), expected[0].numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("output", [[], [4, 4], [4, 4, 4]])
def test_min_tokens_is_that_of_transformers(output):
    row, prompt = random_row(), [2, 3]
    processor = processors().MinNewTokensLengthLogitsProcessor(2, 3, [1, 6], device="cpu")
    expected = processor(torch.tensor([prompt + output]), torch.from_numpy(row[None].copy()))
    params = SamplingParams(min_tokens=3, stop_token_ids=(6,))
    assert np.array_equal(constrained(row, params, output, eos_token_ids=(1,)), expected[0].numpy())


def test_min_tokens_bans_only_what_could_end_the_request():
    row = random_row()
    params = SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(6, VOCAB_SIZE + 5))
    changed = constrained(row, params, [], eos_token_ids=(1, VOCAB_SIZE + 70))
    assert np.flatnonzero(changed != row).tolist() == [6]


def test_all_changes_together_are_those_of_the_plain_loop():
    params = SamplingParams(
        min_tokens=9,
        stop_token_ids=(4,),
        logit_bias={4: 5.0, 6: -3.0, 7: 0.5},
        bad_words_token_ids=((8,), (6, 7), (7, 6)),
        repetition_penalty=1.4,
        presence_penalty=-0.3,
        frequency_penalty=0.7,
    )
    row, prompt, output = random_row(4), [1, 6, 8, 30], [6, 6, 7, 2, 6]
    changed = penalized(constrained(row, params, output, eos_token_ids=(0,)), params, prompt, output)
    np.testing.assert_allclose(changed, adjusted(row, params, prompt, output, (0,)), rtol=1e-6)


def test_only_allowed_tokens_are_left():
    row, allowed = random_row(), [59, 0, 17]
    params = SamplingParams(
        allowed_token_ids=allowed, logit_bias={17: 2.0, 5: 9.0}, bad_words_token_ids=[[0]]
    )
    expected = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
    expected[[59, 17]] = row[59], row[17] + np.float32(2.0)
    np.testing.assert_array_equal(constrained(row, params, [1, 2]), expected)
    assert Constraints.of(params, eos_token_ids=(), vocab_size=VOCAB_SIZE).until == UNTIL_THE_END
