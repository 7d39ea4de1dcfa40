"""best_of and beam search at the front: what the engine is asked for, and what the caller sees."""

from __future__ import annotations

import math

import pytest
from test_input_processor import INFO, TOKENIZER

from quire.engine.core import _sequence
from quire.errors import ConfigError, InvalidRequestError
from quire.front.openvino.generation_config import GenerationConfig
from quire.front.text.input_processor import InputProcessor
from quire.front.text.output_processor import OutputProcessor
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason
from quire.step import PositionLogprobs


def prepared(**params):
    return InputProcessor(TOKENIZER, INFO).process("abc", SamplingParams(**params), request_id="r")


class Table:
    """An output processor with one request in it, whose sequences say what they are told to."""

    def __init__(self, **params) -> None:
        self.outputs = OutputProcessor(TOKENIZER)
        self.state = self.outputs.add(prepared(**params))
        self.ids = self.state.processed.core_request.sequence_ids

    def say(self, index: int, text: str, *logprobs: float, reason: FinishReason | None = None, **more):
        ids = TOKENIZER.encode(text) if text else []
        positions = [
            PositionLogprobs([token], [logprob], [1]) for token, logprob in zip(ids, logprobs, strict=True)
        ]
        output = EngineCoreOutput(self.ids[index], ids, finish_reason=reason, logprobs=positions, **more)
        return self.outputs.apply([output])


def test_best_of_asks_the_engine_for_all_and_for_the_chosen_tokens_log_probabilities():
    processed = prepared(n=2, best_of=5, seed=7)
    core_request = processed.core_request
    assert len(core_request.sequence_ids) == len(core_request.queued_sequence_ids) == 5
    assert core_request.sampling_params.logprobs == 0
    assert processed.params.logprobs is None
    sequences = [_sequence(core_request, index) for index in range(5)]
    assert all((one.sampling_params.n, one.sampling_params.best_of) == (1, None) for one in sequences)
    leader = core_request.sequence_ids[0]
    assert [one.shares_prompt_with for one in sequences] == [None, *[leader] * 4]


def test_log_probabilities_that_were_asked_for_stay_as_many():
    assert prepared(best_of=5, logprobs=3).core_request.sampling_params.logprobs == 3
    assert prepared(n=2).core_request.sampling_params.logprobs is None


def test_the_best_are_shown_when_all_have_ended():
    table = Table(n=2, best_of=3)
    table.say(1, "bb", -1.0, -1.0, reason=FinishReason.LENGTH)
    table.say(0, "a", -0.5)
    shown = table.state.snapshot()
    assert [(one.index, one.text, one.token_ids, one.finish_reason) for one in shown.outputs] == [
        (0, "", [], None),
        (1, "", [], None),
    ]
    assert not shown.finished
    table.say(2, "c", -0.25, reason=FinishReason.LENGTH)
    table.say(0, "a", -4.0, reason=FinishReason.LENGTH)
    best = table.state.snapshot()
    assert best.finished
    assert [(one.index, one.text, one.cumulative_logprob) for one in best.outputs] == [
        (0, "c", -0.25),
        (1, "bb", -2.0),
    ]
    assert all(one.logprobs is None for one in best.outputs), "nobody asked for them"
    assert best.metrics.num_output_tokens == 5, "what was generated, shown or not"


def test_a_stop_string_counts_up_to_the_token_that_completed_it():
    table = Table(best_of=2, stop="y", logprobs=0)
    assert table.say(0, "xyz", -1.0, -2.0, -8.0) == [table.ids[0]]
    table.say(1, "x", -5.0, reason=FinishReason.LENGTH)
    (best,) = table.state.snapshot().outputs
    assert (best.text, best.cumulative_logprob, len(best.logprobs)) == ("x", -3.0, 2)


def test_a_completion_that_failed_is_the_last_choice():
    table = Table(best_of=2)
    table.say(0, "", reason=FinishReason.ERROR, error="broken")
    table.say(1, "x", -9.0, reason=FinishReason.LENGTH)
    (best,) = table.state.snapshot().outputs
    assert (best.text, best.error) == ("x", None)


def test_the_sum_is_known_whenever_log_probabilities_are():
    table = Table(logprobs=0)
    table.say(0, "xy", -1.0, -0.5, reason=FinishReason.LENGTH)
    assert table.state.snapshot().outputs[0].cumulative_logprob == -1.5
    table = Table()
    table.say(0, "xy", -1.0, -0.5, reason=FinishReason.LENGTH)
    assert table.state.snapshot().outputs[0].cumulative_logprob is None


def test_a_beam_search_is_one_request_for_the_engine():
    processed = prepared(n=2, beam_width=4, stop_token_ids=(7, 8))
    core_request = processed.core_request
    params = core_request.sampling_params
    assert (params.temperature, params.logprobs) == (0.0, 4 + 3), "beams, end-of-sequence, two stop tokens"
    assert core_request.queued_sequence_ids == core_request.sequence_ids[:1]
    leader = _sequence(core_request, 0)
    assert leader.beam_sequence_ids == tuple(core_request.sequence_ids)
    assert len(leader.beam_sequence_ids) == leader.sampling_params.n == 2
    assert _sequence(prepared(n=2).core_request, 0).beam_sequence_ids == ()


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"logprobs": 1}, "logprobs", "1.*cumulative_logprob"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "0.*cumulative_logprob"),
        ({"stop_token_ids": tuple(range(5, 16))}, "beam_width", "10 and 12.*22.*20.*stop_token_ids"),
    ],
)
def test_beam_search_refuses(params, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        prepared(beam_width=10, **params)
    assert caught.value.param == param


def test_hypotheses_arrive_whole():
    table = Table(n=2, beam_width=4, stop="y")
    assert [one.text for one in table.state.snapshot().outputs] == ["", ""]
    for index, text in enumerate(("axyz", "b")):
        ids = TOKENIZER.encode(text)
        output = EngineCoreOutput(
            table.ids[index], ids, finish_reason=FinishReason.LENGTH, cumulative_logprob=-1.0 - index
        )
        assert table.outputs.apply([output]) == []
    found = table.state.snapshot()
    assert found.finished
    assert [(one.text, one.finish_reason, one.cumulative_logprob) for one in found.outputs] == [
        ("ax", FinishReason.STOP, -1.0),
        ("b", FinishReason.LENGTH, -2.0),
    ]


def test_openvino_names():
    config = GenerationConfig(
        num_beams=6,
        num_beam_groups=3,
        diversity_penalty=0.7,
        length_penalty=0.5,
        num_return_sequences=4,
        stop_criteria="never",
    )
    params = config.validate().sampling_params(5)
    assert (params.beam_width, params.num_beam_groups, params.n) == (6, 3, 4)
    assert (params.diversity_penalty, params.length_penalty, params.stop_criteria) == (0.7, 0.5, "never")
    assert GenerationConfig().validate().sampling_params(5).beam_width == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 4, "do_sample": True}, "do_sample=False"),
        ({"num_return_sequences": 2}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 3}, "beam_width"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_openvino_names_are_checked(fields, words):
    with pytest.raises((ConfigError, InvalidRequestError), match=words):
        GenerationConfig(**fields).validate()


def test_an_impossible_token_ranks_below_all_others():
    table = Table(best_of=2)
    table.say(0, "a", -math.inf, reason=FinishReason.LENGTH)
    table.say(1, "b", -99.0, reason=FinishReason.LENGTH)
    assert table.state.snapshot().outputs[0].text == "b"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_return_sequences": 129, "do_sample": True}, "num_return_sequences is 129; .* from 1 to 128"),
        ({"rng_seed": 2**63}, "rng_seed is 9223372036854775808; it must be from -2\\^63 to"),
        ({"stop_strings": {""}}, "stop_strings is .* strings of 1 to 1024 characters"),
    ],
)
def test_openvino_names_have_the_limits_of_what_they_stand_for(fields, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        GenerationConfig(**fields).validate()
    assert caught.value.param == next(iter(fields))


def test_one_openvino_stop_string_may_be_given_bare():
    assert GenerationConfig(stop_strings="end").validate().sampling_params(5).stop == ("end",)
