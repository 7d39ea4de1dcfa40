"""Which sampling parameters go together, and what a refusal says."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from quire.errors import InvalidRequestError
from quire.sampling_params import MAX_BEAM_WIDTH, SamplingParams
from quire.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "2.*at least n.*3"),
        ({"best_of": 129}, "best_of", "129.*1 to 128"),
        ({"best_of": 2, "temperature": 0.0}, "best_of", "temperature 0.*the same"),
        ({"beam_width": 1}, "beam_width", "1.*0 for none.*2 to 10"),
        ({"beam_width": 11}, "beam_width", "11.*0 to 10"),
        ({"beam_width": 2, "n": 3}, "n", "3.*at most beam_width.*2"),
        ({"beam_width": 4, "temperature": 0.7}, "temperature", "0.7.*0 or 1.*does not sample"),
        ({"beam_width": 4, "num_beam_groups": 3}, "num_beam_groups", "3.*divisor.*4"),
        ({"beam_width": 4, "diversity_penalty": 0.5}, "diversity_penalty", "0.5.*num_beam_groups"),
        ({"beam_width": 4, "length_penalty": 11.0}, "length_penalty", "11.0.*-10 to 10"),
        ({"beam_width": 4, "stop_criteria": "soon"}, "stop_criteria", "soon.*early, heuristic, never"),
        ({"beam_width": 4, "best_of": 4}, "best_of", "4.*beam search.*beam_width"),
        ({"beam_width": 4, "top_k": 4}, "top_k", "4.*beam search"),
        ({"beam_width": 4, "repetition_penalty": 1.1}, "repetition_penalty", "1.1.*beam search"),
        ({"beam_width": 4, "frequency_penalty": 0.1}, "frequency_penalty", "0.1.*beam search"),
        ({"beam_width": 4, "logit_bias": {5: 1.0}}, "logit_bias", "beam search"),
        ({"beam_width": 4, "bad_words": "x"}, "bad_words", "beam search"),
        (
            {"beam_width": 4, "structured_outputs": StructuredOutputsParams(regex="a+")},
            "structured_outputs",
            "beam search",
        ),
        ({"num_beam_groups": 2}, "num_beam_groups", "2.*set beam_width"),
        ({"diversity_penalty": 0.5}, "diversity_penalty", "set beam_width"),
        ({"length_penalty": 0.0}, "length_penalty", "set beam_width"),
        ({"stop_criteria": "early"}, "stop_criteria", "set beam_width"),
    ],
)
def test_refuses(fields, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "num_sequences", "is_ranked"),
    [
        ({"n": 3}, 3, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 3, "best_of": 5}, 5, True),
        ({"best_of": 1, "temperature": 0.0}, 1, False),
        ({"n": 2, "beam_width": 4}, 2, True),
        ({"beam_width": MAX_BEAM_WIDTH, "num_beam_groups": 5, "diversity_penalty": 1.0}, 1, True),
        ({"beam_width": 2, "temperature": 0.0, "stop": "x", "min_tokens": 3}, 1, True),
    ],
)
def test_says_what_is_generated_and_whether_it_is_ranked(fields, num_sequences, is_ranked):
    params = SamplingParams(**fields)
    assert (params.num_sequences, params.is_ranked) == (num_sequences, is_ranked)


def test_beam_search_takes_the_defaults_of_everything_else():
    others = {field.name for field in dataclasses.fields(SamplingParams)} - {"beam_width"}
    defaults = SamplingParams()
    given = {name: getattr(defaults, name) for name in others}
    assert SamplingParams(beam_width=2, **given) == SamplingParams(beam_width=2)


def test_whole_numbers_are_written_as_floats_are():
    floats = {field.name for field in dataclasses.fields(SamplingParams) if isinstance(field.default, float)}
    of_beams = {"diversity_penalty", "length_penalty"}

    def written(one: float) -> list[bytes]:
        sampled = SamplingParams(**dict.fromkeys(floats - of_beams, one), logit_bias={3: one})
        beams = SamplingParams(**dict.fromkeys(of_beams, one), beam_width=2, num_beam_groups=2)
        return [msgspec.json.encode(params) for params in (sampled, beams)]

    assert written(1) == written(1.0)


def test_a_copy_with_checked_values_differs_in_these_only():
    params = SamplingParams(n=3, temperature=0.5, stop=("a", "b"), logit_bias={1: 2})
    changed = params.with_checked(n=1, seed=7)
    assert changed == dataclasses.replace(params, n=1, seed=7)
    assert (params.n, params.seed) == (3, None)
