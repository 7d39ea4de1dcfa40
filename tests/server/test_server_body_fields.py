"""Request bodies have the fields of the engine's parameters, with the same limits."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from quire.limits import limits_of
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest

BODIES = {
    CompletionRequest: {"model": "m", "prompt": "p"},
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "p"}]},
}
KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


@pytest.mark.parametrize("body", BODIES)
def test_the_schema_has_the_limits_of_every_number_and_choice(body):
    properties = body.model_json_schema()["properties"]
    fields = {**limits_of(SamplingParams), **limits_of(RequestOptions)}
    shared = [name for name in fields if name in properties and name not in ("logprobs", "max_tokens")]
    assert {"n", "temperature", "stop_criteria", "priority", "timeout"} <= set(shared)
    for name in shared:
        schema, limits = properties[name]["anyOf"][0], fields[name]
        if limits.kind in (int, float):
            assert {
                KEYWORDS[bound]: limit for bound, limit in limits.bounds.items()
            }.items() <= schema.items()
        assert schema.get("enum", []) == list(limits.choices)


@pytest.mark.parametrize("body", BODIES)
def test_a_refusal_names_the_whole_range(body):
    with pytest.raises(ValidationError, match="it must be from 1 to 128"):
        body.model_validate({**BODIES[body], "n": 129})


@pytest.mark.parametrize("body", BODIES)
def test_duplicates_do_not_count_towards_the_length_of_a_list(body):
    assert body.model_validate({**BODIES[body], "stop_token_ids": [7, 3] * 100}).stop_token_ids == [7, 3]
    with pytest.raises(ValidationError, match="at most 128"):
        body.model_validate({**BODIES[body], "stop_token_ids": list(range(129))})
