"""Exactly one terminal output, whatever races; `n` merged; log-probabilities with their texts."""

from __future__ import annotations

import dataclasses

import pytest
from test_input_processor import INFO, TOKENIZER

from quire.dialogue.reasoning.formats import REASONING_FORMATS, ExpectedReasoning
from quire.errors import DuplicateRequestError, EngineDeadError, InvalidRequestError, RequestTimeoutError
from quire.front.process.resumption import continuation
from quire.front.text.input_processor import InputProcessor
from quire.front.text.output_processor import OutputProcessor
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason
from quire.step import PositionLogprobs


class Table:
    """An output processor with one request in it."""

    def __init__(self, **params) -> None:
        self.updates = 0
        self.outputs = OutputProcessor(TOKENIZER)
        self.state = self.outputs.add(self.prepared(**params), self.count)
        self.ids = self.state.processed.core_request.sequence_ids

    def prepared(self, **params):
        return InputProcessor(TOKENIZER, INFO).process("abc", SamplingParams(**params), request_id="r")

    def count(self) -> None:
        self.updates += 1

    def say(self, text: str, index: int = 0, *, reason: FinishReason | None = None, **more) -> list[str]:
        """Let the engine produce `text`."""
        ids = TOKENIZER.encode(text, add_special_tokens=False) if text else []
        return self.outputs.apply([EngineCoreOutput(self.ids[index], ids, finish_reason=reason, **more)])

    @property
    def first(self):
        return self.state.snapshot().outputs[0]


def test_a_stop_string_ends_it_in_front_of_the_engine():
    table = Table(stop="yz")
    assert table.say("xy") == []
    assert table.first.text == "x"
    assert table.say("z!") == table.ids
    assert (table.first.text, table.first.finish_reason, table.first.stop_reason) == ("x", "stop", "yz")
    assert table.first.token_ids == TOKENIZER.encode("xyz"), "up to the token that completed it"
    assert table.state.finished
    assert len(table.outputs) == 0


def test_what_the_engine_says_later_is_dropped():
    table = Table(stop="y")
    table.say("xy")
    updates = table.updates
    assert table.say("more", reason=FinishReason.LENGTH) == []
    assert table.updates == updates
    assert table.first.finish_reason is FinishReason.STOP


def test_a_stop_string_in_the_engines_last_output_wins():
    table = Table(stop="y")
    assert table.say("xy", reason=FinishReason.LENGTH) == [], "the engine has ended it already"
    assert (table.first.finish_reason, table.first.stop_reason) == (FinishReason.STOP, "y")


def test_stop_strings_wait_for_the_end_of_each_reasoning_also_in_another_engine():
    table = Table(stop="y", n=2)
    reasoning = ExpectedReasoning(REASONING_FORMATS["exaone"], is_open=True)
    table.outputs = OutputProcessor(TOKENIZER)
    table.state = table.outputs.add(dataclasses.replace(table.prepared(stop="y", n=2), reasoning=reasoning))
    table.ids = table.state.processed.core_request.sequence_ids
    assert table.say("xy</thou") == []
    assert table.say("y</thought>zy", 1) == [table.ids[1]]
    request = continuation(table.state, 0, 0.0)
    assert request.resumed_outputs == [TOKENIZER.encode("xy</thou")]
    assert request.arrival_time == table.state.processed.core_request.arrival_time
    assert table.say("ght>ay") == [table.ids[0]]
    assert [one.text for one in table.state.snapshot().outputs] == ["xy</thought>a", "y</thought>z"]


def test_withheld_text_is_released_at_the_end():
    table = Table(stop="yz")
    table.say("xy", reason=FinishReason.LENGTH)
    assert (table.first.text, table.first.finish_reason) == ("xy", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens():
    table = Table(stop="y", min_tokens=3)
    table.say("xyz")
    assert not table.state.finished
    table.say("ay")
    assert table.first.text == "xyza"


def test_the_stop_token_itself_is_not_shown():
    table = Table(skip_special_tokens=False)
    table.say("x</s>", reason=FinishReason.STOP)
    assert table.first.text == "x"
    assert table.first.token_ids[-1] == 1


def test_the_stop_token_is_shown_if_asked_for():
    table = Table(skip_special_tokens=False, include_stop_str_in_output=True)
    table.say("x</s>", reason=FinishReason.STOP)
    assert table.first.text == "x</s>"


def test_n_completions_end_one_by_one():
    table = Table(n=2, stop="y")
    assert table.say("y", 1) == [table.ids[1]]
    assert not table.state.finished
    assert table.state.live_sequence_ids == [table.ids[0]]
    table.say("x", 0, reason=FinishReason.LENGTH)
    output = table.state.snapshot()
    assert [one.finish_reason for one in output.outputs] == [FinishReason.LENGTH, FinishReason.STOP]
    assert output.finished
    assert output.metrics.num_output_tokens == 2
    assert 0 <= output.metrics.time_to_first_token <= output.metrics.total_time


def test_a_snapshot_does_not_change_later():
    table = Table()
    table.say("x")
    before = table.state.snapshot()
    table.say("y", reason=FinishReason.LENGTH)
    assert (before.outputs[0].text, len(before.outputs[0].token_ids), before.finished) == ("x", 1, False)


def test_logprobs_carry_their_texts():
    table = Table(logprobs=1, prompt_logprobs=0)
    x, y = TOKENIZER.encode("xy")
    entry = PositionLogprobs(token_ids=[x, y], logprobs=[-1.0, -0.5], ranks=[2, 1])
    table.say("x", logprobs=[entry], prompt_logprobs=[entry, entry], num_cached_tokens=3)
    output = table.state.snapshot()
    (position,) = output.outputs[0].logprobs
    assert [(one.decoded_token, one.logprob, one.rank) for one in position.values()] == [
        ("x", -1.0, 2),
        ("y", -0.5, 1),
    ]
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 3
    assert output.num_cached_tokens == 3


def test_live_ids_are_unique():
    table = Table()
    with pytest.raises(DuplicateRequestError, match="'r'"):
        table.outputs.add(table.prepared())
    table.say("x", reason=FinishReason.LENGTH)
    table.outputs.add(table.prepared())


def test_removing_an_ended_request_leaves_its_successor_alone():
    table = Table()
    table.say("x", reason=FinishReason.LENGTH)
    successor = table.outputs.add(table.prepared())
    assert table.outputs.remove(table.state) == []
    assert "r" in table.outputs
    assert table.outputs.remove(successor) == successor.processed.core_request.sequence_ids


def test_a_dead_engine_fails_each_with_an_exception_of_its_own():
    table = Table()
    failure = EngineDeadError("gone")
    table.outputs.fail_all(failure)
    assert table.updates == 1
    assert isinstance(table.state.failure, EngineDeadError)
    assert table.state.failure is not failure
    assert len(table.outputs) == 0


def test_an_output_that_cannot_be_processed_ends_its_request_only(caplog):
    table = Table(logprobs=0)
    other = table.outputs.add(
        InputProcessor(TOKENIZER, INFO).process("b", SamplingParams(), request_id="other")
    )
    assert table.say("x") == table.ids, "its log-probabilities are missing"
    assert "r" not in table.outputs
    assert "could not be processed" in str(table.state.failure)
    assert other.request_id in table.outputs


TIMEOUT = {"reason": FinishReason.ERROR, "error": "too late", "error_type": "RequestTimeoutError"}


def test_an_error_before_anything_was_generated_is_an_exception():
    table = Table()
    table.say("", **TIMEOUT)
    assert isinstance(table.state.error_before_output, RequestTimeoutError)
    assert (table.first.finish_reason, table.first.error) == (FinishReason.ERROR, "too late")
    assert table.first.error_type == "RequestTimeoutError"


def test_an_error_keeps_the_field_that_is_at_fault():
    table = Table()
    fault = {"error": "no grammar", "error_type": "InvalidRequestError", "error_param": "structured_outputs"}
    table.say("", reason=FinishReason.ERROR, **fault)
    error = table.state.error_before_output
    assert isinstance(error, InvalidRequestError)
    assert (str(error), error.param) == ("no grammar", "structured_outputs")
    assert table.first.error_param == "structured_outputs"


def test_what_was_generated_before_an_error_is_kept():
    table = Table(n=2)
    table.say("xy", 1)
    table.say("", 0, **TIMEOUT)
    table.say("", 1, **TIMEOUT)
    assert table.state.finished
    assert table.state.error_before_output is None
    assert [(one.text, one.error_type) for one in table.state.snapshot().outputs] == [
        ("", "RequestTimeoutError"),
        ("xy", "RequestTimeoutError"),
    ]


def test_an_error_of_no_known_class_is_no_exception():
    table = Table()
    table.say("", reason=FinishReason.ERROR, error="a NaN in the logits")
    assert table.state.error_before_output is None
    assert (table.first.error, table.first.error_type) == ("a NaN in the logits", None)


def test_the_first_of_all_admissions_counts_also_if_another_engine_goes_on():
    table = Table(n=2)
    assert table.state.snapshot().first_scheduled_time is None
    table.say("a", 1, first_scheduled_time=7.0)
    table.say("b", 0, first_scheduled_time=9.0)
    table.say("c", 0)
    assert table.state.snapshot().first_scheduled_time == 7.0
