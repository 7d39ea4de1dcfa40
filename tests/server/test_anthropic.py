"""/v1/messages through the real anthropic client, with answers that the test writes."""

import importlib
import json
import math

import httpx
import httpx2
import pytest
from scripted_llm import CALLS, ScriptedLLM

from quire.config import ServerConfig
from quire.server.app import create_app

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
PING = {"name": "ping", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def anthropic():
    """The package, which takes two seconds to import."""
    return importlib.import_module("anthropic")


@pytest.fixture
def llm():
    return ScriptedLLM()


@pytest.fixture
async def claude(app, anthropic):
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", http_client=http, max_retries=0
        )


async def create(claude, **fields):
    return await claude.messages.create(
        **{"model": "fake", "max_tokens": 200, "messages": [USER], "tools": [WEATHER, PING], **fields}
    )


def message(role, **block):
    return {"messages": [{"role": role, "content": [block]}]}


def shown(block):
    return block.type, getattr(block, "text", None), getattr(block, "name", None)


async def refused(anthropic, claude, **fields):
    with pytest.raises(anthropic.BadRequestError) as caught:
        await create(claude, **fields)
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return body["error"]["message"]


async def test_a_plain_answer(claude, llm, anthropic):
    llm.reply = "It is warm."
    answer = await create(
        claude, tools=anthropic.NOT_GIVEN, extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    )
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "It is warm."}]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "fake", "end_turn", None,
    )  # fmt: skip
    assert answer.id == f"msg-{answer._request_id}"
    usage = answer.usage
    assert usage.output_tokens == len(llm.reply)
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens) == (3, 3)
    params = llm.seen[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.9, 200)


async def test_text_and_two_calls(claude, llm):
    answer = await create(claude)
    said, first, second = answer.content
    assert (said.type, said.text) == ("text", "Well.")
    assert (first.type, first.name, first.input) == ("tool_use", "get_weather", {"city": '}"é'})
    assert (second.name, second.input) == ("ping", {})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert answer.stop_reason == "tool_use"
    messages, tools, _ = llm.conversation
    assert messages == [USER]
    assert tools[0] == {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "\\ud83d"}', {"city": "\ud83d"}),
        ('{"city": 99999999999999999999999}', {"city": 99999999999999999999999}),
        ('{"city":\n1e999}', {"city": math.inf}),
    ],
)
async def test_arguments_as_a_model_may_write_them(claude, llm, arguments, expected):
    llm.reply = f'<tool_call>{{"name": "get weather!", "arguments": {arguments}}}</tool_call>'
    [call] = (await create(claude)).content
    assert (call.name, call.input) == ("get weather!", expected)


async def test_turns_of_one_side_are_one(claude, llm):
    call = {"type": "tool_use", "id": "toolu_1", "name": "get weather!", "input": {}}
    await create(
        claude,
        messages=[
            USER,
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
            {"role": "assistant", "content": "Let me see."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
            {"role": "user", "content": "And now?"},
        ],
    )
    messages = llm.conversation[0]
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", "Hi\nthere"), ("assistant", "Let me see."), ("tool", ""), ("user", "And now?"),
    ]  # fmt: skip
    assert messages[1]["tool_calls"][0]["function"]["name"] == "get weather!"


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("limit", range(1, len(CALLS) + 1, 6))
async def test_a_stream_says_what_the_whole_answer_says(claude, limit):
    whole = await create(claude, max_tokens=limit)
    async with claude.messages.stream(
        model="fake", max_tokens=limit, messages=[USER], tools=[WEATHER, PING]
    ) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [
        (block.type, getattr(block, "text", None), getattr(block, "name", None)) for block in streamed.content
    ] == [(block.type, getattr(block, "text", None), getattr(block, "name", None)) for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens == limit
    if limit == len(CALLS):
        assert [block.input for block in streamed.content[1:]] == [{"city": '}"é'}, {}]


async def test_events_come_in_order(http):
    body = {"model": "fake", "max_tokens": 200, "messages": [USER], "tools": [PING], "stream": True}
    answer = await http.post("/v1/messages", json=body)
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "data: " in line
    ]
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if "event: " in line]
    assert names == [event["type"] for event in events]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    blocks = [event for event in events if event["type"].startswith("content_block")]
    position = -1
    is_open = False
    for event in blocks:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                position, is_open = position + 1, True
            case "content_block_stop":
                is_open = False
            case _:
                assert is_open
        assert event["index"] == position
    assert not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == len(CALLS)


async def test_a_stop_sequence_is_named(claude, llm):
    llm.reply, llm.stop_reason = "It is warm.", "END"
    answer = await create(claude, stop_sequences=["END", ""])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert llm.seen[0].params.stop == ("END",)


async def test_a_second_turn_with_results(claude, llm):
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Warm."}]},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
    ]
    reasoning = {"type": "thinking", "thinking": "Ask.", "signature": "s"}
    await create(
        claude,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[
            USER,
            {"role": "assistant", "content": [reasoning, {"type": "text", "text": "Let me see."}, call]},
            {"role": "user", "content": results},
        ],
    )
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert llm.conversation[0] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Ask.",
            "reasoning": "Ask.",
            "thinking": "Ask.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather", "content": "Warm."},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("choice", "must_call", "several"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "ping"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
    ],
)
async def test_choices_of_tools(claude, llm, choice, must_call, several):
    await create(claude, tool_choice=choice)
    structure = llm.seen[0].params.structured_outputs
    assert (structure is not None) == (must_call or not several)
    if choice.get("name"):
        assert "get_weather" not in structure.grammar


async def test_no_tool_is_called_if_none_may_be(claude, llm):
    answer = await create(claude, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == CALLS


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_an_answer_of_a_schema(claude, llm, field, anthropic):
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {field: {"format": form} if field == "output_config" else form}
    await create(claude, tools=anthropic.NOT_GIVEN, extra_body=body)
    assert json.loads(llm.seen[0].params.structured_outputs.json) == SCHEMA


async def test_tokens_are_counted(claude, llm):
    counted = await claude.messages.count_tokens(
        model="fake",
        messages=[USER, {"role": "assistant", "content": "So?"}],
        tools=[PING],
        system="Be kind.",
    )
    assert counted.input_tokens == 3
    assert llm.conversation[1][0]["function"]["name"] == "ping"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "images and documents",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}
                ]
            },
            "thinking block",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "tool_result block",
        ),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [PING, PING]}, "'ping' twice"),
        ({"tool_choice": {"type": "tool", "name": "pong"}}, "'pong'"),
        ({"tool_choice": {"type": "tool"}}, "needs a name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ],
)
async def test_refusals(anthropic, claude, fields, words):
    assert words in await refused(anthropic, claude, **fields)


async def test_errors_have_anthropics_types(claude, llm, anthropic):
    for prompt, kind, error in (
        ("queue", anthropic.RateLimitError, "rate_limit_error"),
        ("crash", anthropic.InternalServerError, "api_error"),
        ("die", anthropic.InternalServerError, "overloaded_error"),
    ):
        with pytest.raises(kind) as caught:
            await create(claude, messages=[{"role": "user", "content": prompt}])
        assert caught.value.body["error"]["type"] == error
    with pytest.raises(anthropic.NotFoundError):
        await create(claude, model="other")


async def test_refusals_before_any_endpoint_have_anthropics_shape(llm):
    app = create_app(llm, ServerConfig(api_key="secret"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        for path, method, headers, status, kind in (
            ("", "POST", {}, 401, "authentication_error"),
            ("", "GET", {"x-api-key": "secret"}, 405, "invalid_request_error"),
            ("/batches", "POST", {"x-api-key": "secret"}, 404, "not_found_error"),
            ("", "POST", {"X-Request-Id": "x" * 200}, 400, "invalid_request_error"),
            ("", "POST", {"Host": "elsewhere.example"}, 421, "invalid_request_error"),
        ):
            answer = await http.request(method, f"/v1/messages{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert "code" in (await http.post("/v1/chat/completions")).json()["error"]


async def test_a_failure_within_a_stream_is_its_last_event(claude, anthropic):
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for _ in await create(claude, messages=[{"role": "user", "content": "fail"}], stream=True):
            pass
    assert caught.value.body["error"]["type"] == "api_error"


async def test_what_has_no_effect_is_named(http):
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], "metadata": {"user_id": "me"}}
    answer = await http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Parameters"] == "metadata"


async def test_thinking_that_the_model_does_not_do_is_named(http):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], "thinking": thinking}
    assert (await http.post("/v1/messages", json=body)).headers["X-Ignored-Parameters"] == "thinking"
    answer = await http.post("/v1/messages", json={**body, "thinking": {"type": "disabled"}})
    assert "X-Ignored-Parameters" not in answer.headers


@pytest.mark.parametrize(
    ("field", "word"), [({"surprise": 1}, "surprise"), ({"thinking": {"type": "enabled"}}, "thinking")]
)
async def test_a_strict_server_refuses_it(strict_http, field, word):
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], **field}
    answer = await strict_http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


async def test_a_reasoning_is_a_block_before_the_others(claude, llm):
    llm.tokenizer.chat_template_source += "<think>{% if enable_thinking %}"
    llm.reply = f"<think>\nHm, hm.\n</think>\n\n{CALLS}"
    reasoning = (await create(claude, thinking={"type": "enabled", "budget_tokens": 1024})).content[0]
    assert (reasoning.type, reasoning.thinking, reasoning.signature) == ("thinking", "Hm, hm.", "")
    assert llm.seen[-1].options["chat_template_kwargs"] == {"enable_thinking": True}
    stream = await create(claude, stream=True)
    events = [event async for event in stream if event.type.startswith("content_block")]
    kinds = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(one.thinking for one in deltas if one.type == "thinking_delta") == "Hm, hm."
    answer = await create(claude, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert llm.seen[-1].options["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
async def test_an_effort_reaches_the_template(claude, llm, effort):
    llm.tokenizer.chat_template_source += "{{ reasoning_effort }}{% if enable_thinking %}"
    body = {"output_config": {"effort": effort}}
    await create(claude, extra_body=body)
    assert llm.seen[-1].options["chat_template_kwargs"] == {
        "enable_thinking": True,
        "reasoning_effort": effort,
    }
    await create(claude, extra_body=body, thinking={"type": "disabled"})
    assert llm.seen[-1].options["chat_template_kwargs"] == {
        "enable_thinking": False,
        "reasoning_effort": effort,
    }


async def test_an_effort_without_effect_is_named(http):
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], "output_config": {"effort": "low"}}
    answer = await http.post("/v1/messages", json=body)
    assert answer.headers["X-Ignored-Parameters"] == "output_config.effort"
    body["output_config"]["effort"] = "lots"
    assert (await http.post("/v1/messages", json=body)).status_code == 400
