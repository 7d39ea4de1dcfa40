"""Tools in /v1/chat/completions, through the real openai client, with answers that the test writes."""

import json
import re

import httpx
import openai
import pytest
from scripted_llm import CALLS, ScriptedLLM, ScriptedTokenizer

from quire.config import ServerConfig
from quire.server.app import create_app

USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "", "parameters": PARAMETERS},
}
PING = {"type": "function", "function": {"name": "ping"}}
PING_FOR_TEMPLATE = {
    "type": "function",
    "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def tool_with(parameters):
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


def allowed_ping(mode):
    ping = {"type": "function", "function": {"name": "ping"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ping]}}


class GemmaTokenizer(ScriptedTokenizer):
    chat_template_source = "{{ tools }}<|channel>thought <channel|> <|tool_call>"
    eos_token_ids = (1,)

    def added_token_id(self, text):
        return {"<|tool_response>": 50}.get(text)


@pytest.fixture
def llm():
    return ScriptedLLM()


async def create(client, **fields):
    asked = {"model": "fake", "messages": [USER], "tools": [WEATHER, PING], **fields}
    return await client.chat.completions.create(**asked)


async def refused(client, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, **fields)
    return caught.value.param, caught.value.message


async def test_an_answer_with_two_calls(client, llm):
    answer = await create(client)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == (
        "function", "get_weather", {"city": '}"é'},
    )  # fmt: skip
    assert (second.function.name, second.function.arguments) == ("ping", "{}")
    assert re.fullmatch(r"call_[0-9a-f]{24}", first.id)
    assert first.id != second.id
    assert answer.usage.completion_tokens == len(CALLS)
    messages, tools, marks = llm.conversation
    assert (messages, tools) == ([USER], [WEATHER, PING_FOR_TEMPLATE])
    assert set(marks) >= {"<tool_call>", "</tool_call>"}
    assert llm.seen[0].params.structured_outputs is None


async def test_marks_of_a_format_are_shown_and_may_end_the_answer(client, llm):
    """Gemma 4 begins reasoning with a token and a word, and a call of it ends with the token of a result."""
    llm.tokenizer = GemmaTokenizer()
    llm.reply = "<|channel>thought\nHm.\n<channel|>Well.<|tool_call>call:ping{}<tool_call|>"
    message = (await create(client)).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Well.")
    assert [call.function.name for call in message.tool_calls] == ["ping"]
    assert set(llm.conversation[2]) >= {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    assert llm.seen[0].params.stop_token_ids == (50,)


async def test_an_answer_of_calls_alone_has_no_content(client, llm):
    llm.reply = CALLS.removeprefix("Well.\n")
    message = (await create(client)).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 2


async def test_an_answer_without_calls(client, llm):
    llm.reply = "It is <tool warm.\n"
    choice = (await create(client)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        llm.reply,
        None,
        "stop",
    )


async def test_calls_that_are_cut_off(client):
    choice = (await create(client, max_tokens=66)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "}'


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_nothing_of_a_call_is_content_wherever_it_is_cut_off(client, llm, choice):
    begin = CALLS.index("<tool_call>") + len("<tool_call>")
    content = "Well." if choice == "auto" else ""
    for limit in range(begin, len(CALLS), 5):
        asked = {"max_tokens": limit, "tool_choice": choice}
        whole = (await create(client, **asked)).choices[0].message
        assert (whole.content or "") == content
        chunks = [chunk async for chunk in await create(client, stream=True, **asked)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content


async def test_stop_strings_count_where_there_may_be_content(client, llm):
    await create(client, stop=["}"], parallel_tool_calls=False)
    await create(client, stop=["}"], tool_choice="required")
    assert [one.params.stop for one in llm.seen] == [("}",), ()]


async def test_a_call_comes_back_whatever_its_name_is(client, llm):
    llm.reply = '<tool_call>{"name": "get weather!"}</tool_call>'
    sent = (await create(client)).choices[0].message.model_dump(exclude_none=True)
    [call] = sent["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "name": "get weather!", "content": "20"}
    await create(client, messages=[USER, sent, result])
    assert llm.conversation[0][2]["name"] == "get weather!"


async def test_a_stream_in_openais_order(client):
    chunks = [
        chunk
        async for chunk in await create(
            client, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[-1].usage.completion_tokens == len(CALLS) + len("No.")
    first = [one for chunk in chunks for one in chunk.choices if one.index == 0]
    assert first[0].delta.role == "assistant"
    assert [one.finish_reason for one in first if one.finish_reason] == ["tool_calls"]
    assert first[-1].finish_reason == "tool_calls"
    assert "".join(one.delta.content or "" for one in first) == "Well."
    assert sum(len(one.logprobs.content) for one in first if one.logprobs) == len(CALLS)
    deltas = [call for one in first for call in one.delta.tool_calls or []]
    for index, name, arguments in ((0, "get_weather", '{"city": "}\\"é"}'), (1, "ping", "{}")):
        [begin, *rest] = [call for call in deltas if call.index == index]
        assert (begin.type, begin.function.name, begin.function.arguments) == ("function", name, "")
        assert begin.id
        assert all(call.id is None and call.function.name is None for call in rest)
        assert "".join(call.function.arguments for call in rest) == arguments
    assert len([call for call in deltas if call.index == 0]) > 5  # as they come
    second = [one for chunk in chunks for one in chunk.choices if one.index == 1]
    assert "".join(one.delta.content or "" for one in second) == "No."
    assert second[-1].finish_reason == "stop"


async def test_results_go_back_to_the_model(client, llm):
    message = (await create(client)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "20"}]}
        for call in message.tool_calls
    ]
    assistant = message.model_dump(exclude_none=True)
    llm.reply = "It is warm."
    answer = await create(client, messages=[USER, {**assistant, "content": None}, *results])
    assert answer.choices[0].message.content == "It is warm."
    [_, sent, first, _] = llm.conversation[0]
    assert sent["content"] == ""
    assert [call["function"] for call in sent["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": '}"é'}},
        {"name": "ping", "arguments": {}},
    ]
    assert first == {
        "role": "tool", "content": "20", "tool_call_id": message.tool_calls[0].id, "name": "get_weather",
    }  # fmt: skip


async def test_arguments_that_are_no_json_stay_text(client, llm):
    call = {"id": "1", "type": "function", "function": {"name": "ping", "arguments": '{"a'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {**USER}]
    await create(client, messages=messages, tools=openai.NOT_GIVEN)
    assert llm.conversation[0][1]["tool_calls"][0]["function"]["arguments"] == '{"a'
    assert llm.conversation[1] is None


async def test_no_tools_are_called_where_none_may_be(client, llm):
    choice = (await create(client, tool_choice="none")).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALLS, "stop")
    assert llm.conversation[1:] == (None, ())


@pytest.mark.parametrize("tools", [[], openai.NOT_GIVEN])
@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_no_tools(client, llm, tools, choice):
    llm.tokenizer.chat_template_source = None
    answer = await create(client, tools=tools, tool_choice=choice, parallel_tool_calls=True)
    assert answer.choices[0].message.content == CALLS


@pytest.mark.parametrize(
    ("fields", "names", "starts_with_call"),
    [
        ({"tool_choice": "required"}, ["get_weather", "ping"], True),
        ({"tool_choice": {"type": "function", "function": {"name": "ping"}}}, ["ping"], True),
        ({"parallel_tool_calls": False}, ["get_weather", "ping"], False),
        ({"tools": [PING, {**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
         ["ping", "get_weather"], False),
        ({"tool_choice": allowed_ping("auto")}, ["ping"], False),
        ({"tool_choice": allowed_ping("required")}, ["ping"], True),
    ],
)  # fmt: skip
async def test_what_is_enforced(client, llm, fields, names, starts_with_call):
    await create(client, **fields)
    grammar = llm.seen[0].params.structured_outputs.grammar
    assert re.findall(r'\\"name\\": \\"(\w+)\\"', grammar) == names
    assert ("\nstart: <[7]>" in f"\n{grammar}") == starts_with_call
    assert len(llm.conversation[1]) == 2  # the model is told of all, so that prefixes stay the same


async def test_content_of_a_schema_beside_calls(client, llm):
    await create(client, response_format={"type": "json_object"})
    assert '%json {"type": "object", "x-guidance"' in llm.seen[0].params.structured_outputs.grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [PING, PING]}, "tools", "twice"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
        ({"tools": [tool_with({"type": "array"})]}, "tools", "always an object"),
        ({"tools": [tool_with({"properties": 3})]}, "tools", "must be an object"),
        ({"tools": [tool_with({"required": 3})]}, "tools", "must be a list"),
        ({"tools": [tool_with({"enum": ["x" * 70_000]})]}, "tools", "65536"),
        ({"tools": [PING] * 129}, "tools", "128"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "pong"}}}, "tool_choice", "ping"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": 3}, "tool_choice", "allowed_tools"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs", "JSON schema"),
        ({"tool_choice": "required", "extra_body": {"beam_width": 2}}, "beam_width", "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"min_tokens": 2}}, "min_tokens", "tool_choice"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", "no content"),
        ({"tool_choice": "required", "tools": [tool_with({"enum": ["x" * 20_000]})]}, "tools", "at most 16"),
    ],
)  # fmt: skip
async def test_what_is_refused(client, fields, param, words):
    name, message = await refused(client, **fields)
    assert name == param
    assert words in message


async def test_a_model_without_a_place_for_tools(client, llm):
    llm.tokenizer.chat_template_source = "{{ messages }}"
    assert await refused(client) == ("tools", await message_with(client, "no place for tools"))


async def message_with(client, words):
    _, message = await refused(client)
    assert words in message
    return message


async def test_the_format_may_be_given(llm):
    llm.tokenizer.chat_template_source = "{{ tools }}"
    llm.reply = '[TOOL_CALLS][{"name": "ping", "arguments": {}}]'
    for name, is_known in (("auto", False), ("mistral", True)):
        app = create_app(llm, ServerConfig(tool_call_format=name))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as http:
            client = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
            )
            if is_known:
                [call] = (await create(client)).choices[0].message.tool_calls
                assert re.fullmatch(r"[A-Za-z0-9]{9}", call.id)
            else:
                await message_with(client, "--tool-call-format")
