"""response_format and structured_outputs: what reaches the engine, and what is refused."""

import json

import pytest

from quire.structured_outputs import StructuredOutputsParams

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


async def ask(http, **fields):
    return await http.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **fields})


async def test_an_answer_in_the_form_of_a_schema(client, llm):
    schema = {"name": "person", "description": "Who", "strict": True, "schema": SCHEMA}
    await client.chat.completions.create(
        model="fake",
        messages=[USER],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(llm.seen[0].params.structured_outputs.json) == SCHEMA


async def test_an_answer_that_is_any_object(client, llm):
    await client.chat.completions.create(
        model="fake", messages=[USER], response_format={"type": "json_object"}
    )
    assert json.loads(llm.seen[0].params.structured_outputs.json) == {"type": "object"}


@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
async def test_an_answer_in_plain_text(http, llm, response_format):
    assert (await ask(http, response_format=response_format)).status_code == 200
    assert llm.seen[0].params.structured_outputs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": "[0-9]+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"', "regex": None},
    ],
)
async def test_vllms_extra_field_in_both_endpoints(client, llm, fields):
    extra = {"structured_outputs": fields}
    await client.completions.create(model="fake", prompt="Hi", extra_body=extra)
    await client.chat.completions.create(
        model="fake", messages=[USER], extra_body=extra, response_format={"type": "text"}
    )
    expected = StructuredOutputsParams(**fields)
    assert [seen.params.structured_outputs for seen in llm.seen] == [expected, expected]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", ["xml", "'json_schema'"]),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["needs"]),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
            ["'text'", "does not take"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            ["missing"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            ["a b"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schemas": {}}}},
            "response_format.json_schema.schemas",
            ["unknown", "'schema'"],
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            ["give one of them"],
        ),
        ({"structured_outputs": {}}, "structured_outputs", ["no field", "exactly one"]),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", ["regex, grammar"]),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", ["5", "JSON schema"]),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", ["not JSON"]),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", ["unknown", "'regex'"]),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", ["at least one"]),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", ["string"]),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", ["1024"]),
        ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs", ["20000", "16384"]),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", ["grammar"]),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", ["2", "grammar"]),
    ],
)
async def test_what_cannot_be_asked_for(http, llm, fields, param, words):
    response = await ask(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
    assert not llm.seen


LARGE = {"type": "string", "description": "x" * 65_536}


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        (
            "/v1/chat/completions",
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LARGE}}},
        ),
        (
            "/v1/responses",
            "text.format.schema",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": LARGE}}},
        ),
        (
            "/v1/messages",
            "output_config.format.schema",
            {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
        ),
        (
            "/v1/messages",
            "output_format.schema",
            {"max_tokens": 9, "output_format": {"type": "json_schema", "schema": LARGE}},
        ),
        ("/api/chat", "format", {"format": LARGE}),
        ("/v1/completions", "structured_outputs", {"prompt": "Hi", "structured_outputs": {"json": LARGE}}),
    ],
)
async def test_a_schema_that_is_too_large_is_called_as_the_client_called_it(http, path, field, fields):
    messages = {} if "prompt" in fields or "input" in fields else {"messages": [USER]}
    answer = await http.post(path, json={"model": "fake", **messages, **fields})
    assert answer.status_code == 400, answer.text
    assert field in answer.text
    assert "the limit is 65536" in answer.text
    assert ("structured_outputs" in answer.text) == (path == "/v1/completions")
