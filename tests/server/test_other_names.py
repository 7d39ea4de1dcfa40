"""Fields under the names that vLLM, SGLang, llama.cpp and others give them."""

import pytest
from fake_llm import MAX_MODEL_LEN

from quire.server.wire.leniency import HEADER
from quire.structured_outputs import StructuredOutputsParams

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def structure(**fields):
    return {"structured_outputs": StructuredOutputsParams(**fields)}


async def complete(http, **fields):
    return await http.post("/v1/completions", json={"model": "fake", "prompt": "Hi", **fields})


async def chat(http, **fields):
    return await http.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **fields})


CASES = [
    ({"guided_json": SCHEMA}, structure(json=SCHEMA)),
    ({"guided_json": '{"type": "integer"}'}, structure(json='{"type": "integer"}')),
    ({"json_schema": SCHEMA}, structure(json=SCHEMA)),
    ({"guided_regex": "a+"}, structure(regex="a+")),
    ({"regex": "a+"}, structure(regex="a+")),
    ({"guided_choice": ["a", "b"]}, structure(choice=("a", "b"))),
    ({"guided_grammar": 'root ::= "a"'}, structure(grammar='root ::= "a"')),
    ({"ebnf": 'root ::= "a"'}, structure(grammar='root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, structure(grammar='root ::= "a"')),
    ({"max_new_tokens": 5}, {"max_tokens": 5}),
    ({"n_predict": 5.0}, {"max_tokens": 5}),
    ({"num_predict": 5, "max_tokens": 5}, {"max_tokens": 5}),
    ({"max_tokens_to_sample": 5}, {"max_tokens": 5}),
    ({"max_tokens": 7, "n_predict": -1}, {"max_tokens": 7}),
    ({"n_predict": -1}, {"max_tokens": MAX_MODEL_LEN}),
    ({"n_cmpl": 2}, {"n": 2}),
    ({"n_probs": 3}, {"logprobs": 3}),
    ({"n_probs": 0, "grammar": "", "seed": -1}, {"logprobs": None, "structured_outputs": None, "seed": None}),
    ({"min_new_tokens": 2, "max_new_tokens": 5}, {"min_tokens": 2}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"stop_sequences": ["x"]}, {"stop": ("x",)}),
    ({"stop_sequences": [""], "regex": None}, {"stop": (), "structured_outputs": None}),
    ({"structured_outputs": {"regex": "a+"}, "guided_regex": "a+"}, structure(regex="a+")),
]
VALUES = [
    ({"max_tokens": -1}, {"max_tokens": MAX_MODEL_LEN}),
    ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5, 6: -100.0}}),
    ({"logit_bias": []}, {"logit_bias": {}}),
]


@pytest.mark.parametrize(("fields", "expected"), CASES + VALUES)
@pytest.mark.parametrize("send", [complete, chat])
async def test_they_mean_the_same(http, llm, send, fields, expected):
    response = await send(http, **fields)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    assert {name: getattr(llm.seen[0].params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": [USER], "max_tokens": 2}), ("/v1/responses", {"input": "Hi"})],
)
async def test_values_mean_the_same_in_all_apis(http, strict_http, llm, path, body):
    body = {"model": "fake", "top_k": -1, "top_p": 0, **body}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    params = llm.seen[0].params
    assert (params.top_k, params.top_p, params.temperature) == (0, 1.0, 0.0)
    assert (await strict_http.post(path, json=body)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens", "max_tokens mean the same and differ"),
        ({"max_new_tokens": 5, "n_predict": 6}, "n_predict", "max_tokens mean the same and differ"),
        ({"stop": "a", "stop_sequences": ["b"]}, "stop_sequences", "give one of them"),
        ({"regex": "a", "guided_regex": "b"}, "regex", "structured_outputs.regex mean the same"),
        ({"structured_outputs": {"json": {}}, "guided_json": SCHEMA}, "guided_json", "outputs.json mean the"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "structured_outputs", "json"),
        ({"structured_outputs": "x", "regex": "a"}, "structured_outputs", '"x"'),
        ({"guided_choice": "a"}, "structured_outputs.choice", '"a"'),
        ({"max_new_tokens": 0.5}, "max_tokens", "0.5"),
        ({"logit_bias": [["Hi", 1.5]]}, "logit_bias", "an object"),
        ({"logit_bias": [[5, True]]}, "logit_bias.5", "true"),
        ({"logit_bias": [[one, 1] for one in range(1_025)]}, "logit_bias", "1024"),
        ({"max_tokens": -2}, "max_tokens", "-2"),
    ],
)  # fmt: skip
async def test_what_is_refused(http, fields, param, words):
    response = await complete(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("fields", [fields for fields, _ in CASES])
async def test_a_strict_server_refuses_them(strict_http, fields):
    response = await complete(strict_http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("unknown parameter")


@pytest.mark.parametrize("fields", [fields for fields, _ in VALUES])
async def test_a_strict_server_refuses_other_values(strict_http, fields):
    response = await complete(strict_http, **fields)
    assert response.json()["error"]["param"] in fields


@pytest.mark.parametrize("send", [complete, chat])
async def test_tokens_are_returned(http, send):
    answer = (await send(http, return_tokens=True, max_tokens=2)).json()
    assert len(answer["choices"][0]["token_ids"]) == 2
