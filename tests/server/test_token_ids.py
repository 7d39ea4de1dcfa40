"""return_token_ids and prompt_logprobs, in the shapes of vLLM's answers."""

import pytest
from fake_llm import BOS, REPLY

USER = {"role": "user", "content": "Hi"}
HI = [BOS, *map(ord, "Hi")]
ANSWER = list(map(ord, REPLY[:5]))


async def complete(client, **fields):
    asked = {"model": "fake", "prompt": "Hi", "max_tokens": 5, "seed": 0}
    stream, echo = fields.pop("stream", False), fields.pop("echo", None)
    named = {} if echo is None else {"echo": echo}
    return await client.completions.create(**asked, **named, stream=stream, extra_body=fields)


async def chat(client, *, stream=False, **fields):
    asked = {"model": "fake", "messages": [USER], "max_tokens": 5, "seed": 0}
    return await client.chat.completions.create(**asked, stream=stream, extra_body=fields)


async def test_token_ids_of_whole_answers(client):
    [choice] = (await complete(client, return_token_ids=True)).choices
    assert (choice.prompt_token_ids, choice.token_ids) == (HI, ANSWER)
    answer = await chat(client, return_token_ids=True)
    assert answer.prompt_token_ids == HI
    assert answer.choices[0].token_ids == ANSWER
    [scored] = (await complete(client, return_token_ids=True, echo=True, max_tokens=0)).choices
    assert (scored.prompt_token_ids, scored.token_ids) == (HI, [])


async def test_several_prompts_have_their_own(client):
    answer = await complete(client, prompt=["Hi", "Ho"], n=2, return_token_ids=True)
    found = [(choice.prompt_token_ids[-1], choice.token_ids) for choice in answer.choices]
    turned = list(map(ord, REPLY[1:6]))
    assert found == [(ord(last), ids) for last in "io" for ids in (ANSWER, turned)]


async def test_token_ids_of_streams(client):
    chunks = [chunk async for chunk in await complete(client, stream=True, return_token_ids=True)]
    choices = [chunk.choices[0].model_extra for chunk in chunks]
    assert [one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one] == [HI]
    assert [token for one in choices for token in one.get("token_ids", [])] == ANSWER
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY[:5]
    chunks = [chunk async for chunk in await chat(client, stream=True, return_token_ids=True)]
    assert [chunk.model_extra.get("prompt_token_ids") for chunk in chunks][:2] == [HI, None]
    choices = [chunk.choices[0].model_extra for chunk in chunks]
    assert [token for one in choices for token in one.get("token_ids", [])] == ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY[:5]


async def test_they_come_only_when_asked_for(http):
    body = {"model": "fake", "prompt": "Hi", "messages": [USER], "return_token_ids": False}
    for path, other in (("/v1/completions", "messages"), ("/v1/chat/completions", "prompt")):
        answer = await http.post(path, json={name: value for name, value in body.items() if name != other})
        assert answer.status_code == 200
        assert "token_ids" not in answer.text
        assert "prompt_logprobs" not in answer.text


EXPECTED = [
    None,
    {
        str(ord("H")): {"logprob": -0.25, "rank": 1, "decoded_token": "H"},
        str(ord("I")): {"logprob": -1.0, "rank": 2, "decoded_token": "I"},
    },
    {
        str(ord("i")): {"logprob": -0.25, "rank": 1, "decoded_token": "i"},
        str(ord("j")): {"logprob": -1.0, "rank": 2, "decoded_token": "j"},
    },
]


async def test_log_probabilities_of_the_prompt(client):
    [choice] = (await complete(client, prompt_logprobs=2)).choices
    assert choice.prompt_logprobs == EXPECTED
    assert (await chat(client, prompt_logprobs=2)).prompt_logprobs == EXPECTED


async def test_an_echo_with_fewer_of_them(client):
    [choice] = (await complete(client, prompt_logprobs=1, echo=True, logprobs=2)).choices
    assert [None if one is None else len(one) for one in choice.prompt_logprobs] == [None, 1, 1]
    assert len(choice.logprobs.top_logprobs[1]) == 2
    [choice] = (await complete(client, prompt_logprobs=2, echo=True, logprobs=1)).choices
    assert choice.prompt_logprobs == EXPECTED
    assert len(choice.logprobs.top_logprobs[1]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 2, "stream": True}, "stream"), ({"prompt_logprobs": 21}, "prompt_logprobs")],
)
async def test_what_is_refused(http, fields, param):
    response = await http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
