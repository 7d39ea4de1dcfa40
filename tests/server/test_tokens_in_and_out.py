"""Prompts rendered as tokens, and tokens generated from tokens, in vLLM's shapes."""

import json

import pytest
from fake_llm import BOS, REPLY

USER = {"role": "user", "content": "Hi"}
HI = [BOS, *map(ord, "Hi")]
ANSWER = list(map(ord, REPLY[:5]))
FIVE = {"max_tokens": 5, "seed": 0}


async def answer_to(http, path, status=200, **body):
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_rendered_chat_is_a_body_that_generates_the_same_tokens(http, llm):
    asked = {"model": "fake", "messages": [USER], **FIVE, "cache_salt": "s", "priority": 3, "stop": ["zz"]}
    rendered = await answer_to(http, "/v1/chat/completions/render", **asked)
    assert (rendered["token_ids"], rendered["model"], rendered["features"]) == (HI, "fake", None)
    assert not llm.seen  # nothing is generated
    answer = await answer_to(http, "/inference/v1/generate", **rendered)
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["logprobs"]) == (ANSWER, "length", None)
    assert answer["request_id"] == rendered["request_id"]
    [generated] = llm.seen
    assert list(generated.prompt) == HI
    assert (generated.params.max_tokens, generated.params.stop, generated.params.seed) == (5, ("zz",), 0)
    assert generated.options["cache_salt"] == "s"
    assert generated.options["priority"] == 3


async def test_each_prompt_of_a_completion_is_rendered(http):
    rendered = await answer_to(
        http, "/v1/completions/render", model="fake", prompt=["Hi", "Ho"], max_tokens=5
    )
    assert [one["token_ids"] for one in rendered] == [HI, [BOS, *map(ord, "Ho")]]
    assert [one["sampling_params"] for one in rendered] == [{"max_tokens": 5}] * 2


async def test_every_parameter_survives_being_rendered(http, llm):
    given = {
        "n": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": 1.5}, "max_tokens": 6,
        "allowed_token_ids": [3, 4], "bad_words": ["no"], "stop": ["a", "b"], "stop_token_ids": [9],
        "min_tokens": 2, "logprobs": 2, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    [rendered] = await answer_to(http, "/v1/completions/render", model="fake", prompt="Hi", **given)
    await answer_to(http, "/inference/v1/generate", **rendered)
    await answer_to(http, "/v1/completions", model="fake", prompt="Hi", **given)
    of_tokens, of_text = llm.seen
    assert of_tokens.params == of_text.params
    assert rendered["sampling_params"].keys() == given.keys()
    structure = {"structured_outputs": {"choice": ["x", "y"]}}
    [rendered] = await answer_to(http, "/v1/completions/render", model="fake", prompt="Hi", **structure)
    assert rendered["sampling_params"]["structured_outputs"] == {"choice": ["x", "y"]}
    await answer_to(http, "/inference/v1/generate", **rendered)
    assert llm.seen[-1].params.structured_outputs.choice == ("x", "y")


async def test_logprobs_name_tokens_by_their_ids(http):
    asked = {"token_ids": HI, "sampling_params": {**FIVE, "logprobs": 2}}
    [choice] = (await answer_to(http, "/inference/v1/generate", **asked))["choices"]
    content = choice["logprobs"]["content"]
    assert [(one["token_id"], one["token"], one["rank"]) for one in content] == [
        (token_id, f"token_id:{token_id}", 1) for token_id in ANSWER
    ]
    assert {one["logprob"] for one in content} == {-0.25}
    assert [top["token_id"] for top in content[0]["top_logprobs"]] == [ANSWER[0], ANSWER[0] + 1]


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
async def test_streamed_tokens(http, options):
    asked = {"token_ids": HI, "sampling_params": {**FIVE, "logprobs": 0}, "request_id": "mine"}
    response = await http.post(
        "/inference/v1/generate", json={**asked, "stream": True, "stream_options": options}
    )
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == ANSWER
    named = [one["token_id"] for choice in choices for one in choice["logprobs"]["content"]]
    assert named == ANSWER
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert {event["request_id"] for event in events} == {"mine"}
    usages = [event["usage"] for event in events]
    if options is None:
        assert set(map(str, usages)) == {"None"}
    else:
        assert usages[-1]["completion_tokens"] == 5
        assert events[-1]["choices"] == []
        assert all(usages) == ("continuous_usage_stats" in options)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": "Hi"}, "token_ids"),
        ({"token_ids": HI, "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": HI, "sampling_params": {"max_token": 3}}, "sampling_params.max_token"),
        ({"token_ids": HI, "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"token_ids": HI, "stream": True, "sampling_params": {"prompt_logprobs": 1}}, "stream"),
        ({"token_ids": HI, "model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(strict_http, body, param):
    status = 404 if param == "model" else 400
    error = (await answer_to(strict_http, "/inference/v1/generate", status, **body))["error"]
    assert error["param"] == param


async def test_tokens_are_named_by_their_ids_on_demand(http):
    names = [f"token_id:{token_id}" for token_id in ANSWER]
    asked = {"model": "fake", **FIVE, "return_tokens_as_token_ids": True}
    completion = await answer_to(http, "/v1/completions", prompt="Hi", logprobs=1, **asked)
    assert completion["choices"][0]["logprobs"]["tokens"] == names
    assert list(completion["choices"][0]["logprobs"]["top_logprobs"][0]) == names[:1]
    chat = await answer_to(
        http, "/v1/chat/completions", messages=[USER], logprobs=True, top_logprobs=1, **asked
    )
    assert [one["token"] for one in chat["choices"][0]["logprobs"]["content"]] == names


async def test_the_number_of_ranks(http):
    assert (await http.get("/get_world_size")).json() == {"world_size": 1}
