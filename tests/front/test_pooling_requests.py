"""Requests that are pooled, in the front: what is refused, what the engine is sent, and what comes back."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from test_input_processor import INFO, TOKENIZER

from quire.engine.messages import Ready, StepOutputs, decode_from_engine, decode_to_engine, encode
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError
from quire.front.process.resumption import continuation
from quire.front.similarity import different_texts
from quire.front.text.input_processor import InputProcessor
from quire.front.text.output_processor import OutputProcessor, RequestState
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason

OWN = PoolingParams(pooling_type="mean", normalize=True)
POOLED = msgspec.structs.replace(INFO, pooling=OWN)
ROW = np.array([1.5, -2.0, 3.25], dtype=np.float32)


@pytest.fixture
def inputs() -> InputProcessor:
    return InputProcessor(TOKENIZER, POOLED)


def state_of(inputs: InputProcessor, prompt="abc", **options) -> RequestState:
    processed = inputs.process_pooling(prompt, PoolingParams(), request_id="r", **options)
    return OutputProcessor(TOKENIZER).add(processed)


def test_what_is_left_open_is_as_the_model_was_trained(inputs):
    for given, expected in (
        ({}, OWN),
        ({"pooling_type": "last"}, PoolingParams(pooling_type="last", normalize=True)),
        ({"normalize": False}, PoolingParams(pooling_type="mean", normalize=False)),
    ):
        request = inputs.process_pooling("abc", PoolingParams(**given)).core_request
        assert request.pooling_params == expected
        assert request.prompt_token_ids == TOKENIZER.encode("abc")
        assert len(request.sequence_ids) == 1


def test_parameters_are_checked():
    with pytest.raises(InvalidRequestError, match="normalize is 'yes'"):
        PoolingParams(normalize="yes")
    with pytest.raises(ConfigError, match="no field 'pooling'; did you mean 'pooling_type'"):
        PoolingParams(pooling="mean")


def test_the_whole_length_is_for_the_prompt(inputs):
    assert inputs.process_pooling([3] * 20, PoolingParams())
    with pytest.raises(ContextLengthError, match=r"has 21 tokens; the limit is 20 \(max_model_len is 20\)"):
        inputs.process_pooling([3] * 21, PoolingParams())
    with pytest.raises(ContextLengthError, match=r"more than 20 tokens; the limit is 20"):
        inputs.process_pooling("abc " * 5000, PoolingParams())
    kept = inputs.process_pooling([*range(3, 33)], PoolingParams(), truncate_prompt_tokens=-1)
    assert kept.core_request.prompt_token_ids == [*range(13, 33)]


def test_models_of_the_other_kind_are_refused(inputs):
    with pytest.raises(InvalidRequestError, match=r"the model test pools each prompt and cannot generate"):
        inputs.process("abc", SamplingParams())
    with pytest.raises(InvalidRequestError, match="test generates, and its prompts cannot be pooled"):
        InputProcessor(TOKENIZER, INFO).process_pooling("abc", PoolingParams())


def test_messages_carry_it(inputs):
    request = inputs.process_pooling("abc", PoolingParams()).core_request
    assert decode_to_engine(encode(request)) == request
    assert decode_from_engine(encode(Ready(POOLED))) == Ready(POOLED)
    output = EngineCoreOutput("r#0.0", [], FinishReason.STOP, pooled=ROW.tobytes())
    assert decode_from_engine(encode(StepOutputs([output]))) == StepOutputs([output])


def test_another_engine_is_asked_for_the_same(inputs):
    state = state_of(inputs)
    again = continuation(state, math.inf, 0.0)
    assert again.pooling_params == OWN
    assert again.resumed_outputs == [[]]


@pytest.mark.parametrize(
    ("end", "data", "error"),
    [
        ({"finish_reason": FinishReason.STOP, "pooled": ROW.tobytes()}, ROW, None),
        ({"finish_reason": FinishReason.ABORT}, None, None),
        ({"finish_reason": FinishReason.ERROR, "error": "broken"}, None, "broken"),
    ],
    ids=["row", "aborted", "failed"],
)
def test_an_output_is_a_row_or_why_there_is_none(inputs, end, data, error):
    outputs = OutputProcessor(TOKENIZER)
    state = outputs.add(inputs.process_pooling("abc", PoolingParams(), request_id="r"))
    assert not state.pooling_snapshot().finished
    [sequence_id] = state.processed.core_request.sequence_ids
    assert outputs.apply([EngineCoreOutput(sequence_id, [], num_cached_tokens=2, **end)]) == []
    output = state.pooling_snapshot()
    assert output.finished
    assert (output.prompt, output.num_cached_tokens) == ("abc", 2)
    assert output.outputs.finish_reason == end["finish_reason"]
    assert output.outputs.error == error
    if data is None:
        assert output.outputs.data is None
    else:
        np.testing.assert_array_equal(output.outputs.data, data)
        assert not output.outputs.data.flags.writeable


def test_each_different_text_of_a_side_is_embedded_once() -> None:
    texts, numbers = different_texts([("a", "b"), ("a", "a"), ("c", "b"), ("a", "b")])
    assert texts == [(0, "a"), (0, "c"), (1, "b"), (1, "a")]
    assert numbers == [(0, 2), (0, 3), (1, 2), (0, 2)]
    assert different_texts([]) == ([], [])
