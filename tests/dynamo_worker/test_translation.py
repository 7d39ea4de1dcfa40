"""Requests of Dynamo as sampling parameters and options, and outputs as chunks; needs no Dynamo."""

from __future__ import annotations

from typing import Any

import pytest

from quire.dynamo.translation import Chunks, request_options, sampling_fields
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import SamplingParams
from quire.status import FinishReason

# As Dynamo 1.6.1's front end sends it: every field is there, and most are null.
REQUEST: dict[str, Any] = {
    "model": "mini",
    "token_ids": [3, 1009, 16],
    "stop_conditions": {
        "max_tokens": 4,
        "stop": ["x"],
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [1, 0],
        "min_tokens": 2,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "temperature": 0.5,
        "top_k": 5,
        "use_beam_search": None,
        "guided_decoding": None,
    },
    "output_options": {"logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": None},
    "eos_token_ids": [1, 0],
    "annotations": [],
    "routing": {"dp_rank": 0, "cache_salt": "abc", "priority_jump": 3.0, "priority": 3},
    "router_config_override": None,
    "extra_args": {"nvext": {"cache_salt": "abc"}},
}


def test_a_request_of_the_front_end_becomes_sampling_parameters_and_options() -> None:
    params = SamplingParams(**sampling_fields(REQUEST, "both"))
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k) == (4, 2, 0.5, 5)
    assert params.logprobs == 2
    assert params.stop_token_ids == (1, 0)
    assert params.stop == ()  # the front end looks for it
    assert request_options(REQUEST, "both") == {"priority": -3, "cache_salt": "abc"}


def test_a_prefill_engine_computes_the_prompt_and_keeps_it() -> None:
    fields = sampling_fields(REQUEST, "prefill")
    assert fields["max_tokens"] == 1
    assert fields.keys() & {"min_tokens", "logprobs", "structured_outputs"} == set()
    params = request_options(REQUEST, "prefill")["kv_transfer_params"]
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize("handed_over", [{"remote_host": "10.0.0.1", "remote_port": 7}, None])
def test_a_decode_engine_gets_what_the_prefill_engine_returned(handed_over: dict[str, Any] | None) -> None:
    result = {"disaggregated_params": {"kv_transfer_params": handed_over}, "prompt_tokens_details": None}
    options = request_options({"token_ids": [1], "prefill_result": result}, "decode")
    assert options == {"kv_transfer_params": handed_over}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"sampling_options": {"n": 2}}, "sampling_options.n"),
        ({"sampling_options": {"best_of": 2}}, "sampling_options.best_of"),
        ({"sampling_options": {"use_beam_search": True}}, "sampling_options.use_beam_search"),
        ({"sampling_options": {"length_penalty": 2.0}}, "sampling_options.length_penalty"),
        ({"sampling_options": {"unheard_of": [1]}}, "sampling_options.unheard_of"),
        (
            {"sampling_options": {"guided_decoding": {"structural_tag": {"a": 1}}}},
            "sampling_options.guided_decoding.structural_tag",
        ),
        ({"sampling_options": {"guided_decoding": 7}}, "sampling_options.guided_decoding"),
        ({"sampling_options": [1]}, "sampling_options"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "stop_conditions.max_thinking_tokens"),
        ({"stop_conditions": {"stop_token_ids": 3}}, "stop_conditions.stop_token_ids"),
        ({"output_options": {"prompt_logprobs": 0}}, "output_options.prompt_logprobs"),
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
        ({"extra_args": {"sampling_options": {"n": 2}}}, "extra_args.sampling_options"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_fields({"token_ids": [1], **given}, "both")
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"routing": {"lora_name": "a"}}, "routing.lora_name"),
        ({"routing": {"priority": "high"}}, "routing.priority"),
        ({"prefill_result": 3}, "prefill_result"),
        ({"prefill_result": {"disaggregated_params": [3]}}, "prefill_result.disaggregated_params"),
    ],
)
def test_options_that_are_malformed_are_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_options({"token_ids": [1], **given}, "decode")
    assert caught.value.param == name


def test_with_ignore_eos_only_the_request_s_own_stop_tokens_end_it() -> None:
    stop = {"ignore_eos": True, "stop_token_ids": [7], "stop_token_ids_hidden": [1]}
    assert sampling_fields({"stop_conditions": stop}, "both")["stop_token_ids"] == [7]


def test_a_grammar_is_passed_on() -> None:
    options = {"guided_decoding": {"json": {"type": "object"}, "regex": None, "backend": "auto"}}
    structure = sampling_fields({"sampling_options": options}, "both")["structured_outputs"]
    assert structure.json == '{"type": "object"}'


def _output(tokens: list[int], reason: FinishReason | None = None, **fields: Any) -> RequestOutput:
    logprobs = [{token: Logprob(-0.5, 1, f"<{token}>"), 9: Logprob(-1.0, 2, "<9>")} for token in tokens]
    completion = CompletionOutput(0, "", tokens, logprobs, reason)
    return RequestOutput("r", None, [1, 2, 3], [completion], finished=reason is not None, **fields)


def test_chunks_hold_what_is_new_and_the_last_one_the_usage() -> None:
    chunks = Chunks("both")
    [first] = chunks.of(_output([5, 6]))
    assert first["token_ids"] == [5, 6]
    assert first["log_probs"] == [-0.5, -0.5]
    assert first["top_logprobs"][1][1] == {"rank": 2, "token_id": 9, "token": "<9>", "logprob": -1.0}
    assert list(chunks.of(_output([5, 6]))) == []
    [last] = chunks.of(_output([5, 6, 7], FinishReason.LENGTH, num_cached_tokens=2))
    assert (last["token_ids"], last["finish_reason"]) == ([7], "length")
    assert last["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("reason", "expected"), [(FinishReason.STOP, "stop"), (FinishReason.ABORT, "cancelled")]
)
def test_finish_reasons_are_dynamo_s(reason: FinishReason, expected: str) -> None:
    [chunk] = Chunks("both").of(_output([5], reason))
    assert chunk["finish_reason"] == expected


def test_a_failed_completion_has_no_chunk() -> None:
    assert list(Chunks("both").of(_output([5], FinishReason.ERROR))) == []


@pytest.mark.parametrize("params", [{"remote_port": 7}, None])
def test_a_prefill_engine_s_last_chunk_says_where_the_kv_is(params: dict[str, Any] | None) -> None:
    [chunk] = Chunks("prefill").of(_output([5], FinishReason.LENGTH, kv_transfer_params=params))
    assert chunk["disaggregated_params"] == {"kv_transfer_params": params}
