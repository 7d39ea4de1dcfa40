"""Calls that are malformed, and several calls: what each API tells, whole and streamed."""

import json

import httpx
import pytest
from scripted_llm import ScriptedLLM

from quire.config import ServerConfig
from quire.server.app import create_app

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "ping", "parameters": SCHEMA}
USER = {"role": "user", "content": "Hi"}
GOOD = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'
BAD = '<tool_call>{"name": "ping", "arguments": {"a": NaN}}</tool_call>'
# format, answer, content, arguments of the complete calls, whether the answer ends as one of calls
ANSWERS = [
    ("hermes", f"Hm. {BAD}", f"Hm. {BAD}", [], False),
    ("hermes", f"{GOOD}\n{BAD}", BAD, [{"a": 1}], False),
    ("hermes", f"{GOOD}{GOOD}", "", [{"a": 1}, {"a": 1}], True),
    ("hermes", BAD.replace("{", "", 2), BAD.replace("{", "", 2), [], False),
    ("pythonic", "[ping(a=-1), ping(a=0x1F,\n)]", "", [{"a": -1}, {"a": 31}], True),
    ("pythonic", "[ping(a=b)]", "[ping(a=b)]", [], False),
]


@pytest.fixture
def llm():
    return ScriptedLLM()


@pytest.fixture
async def http(llm, call_format):
    app = create_app(llm, ServerConfig(tool_call_format=call_format))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def posted(http, path, **fields):
    answer = await http.post(path, json={"model": "fake", **fields})
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n")
    if not fields["stream"]:
        return json.loads(answer.text)
    texts = (
        lines if path == "/api/chat" else [line.removeprefix("data: ") for line in lines if "data: {" in line]
    )
    return [json.loads(text) for text in texts if text.startswith("{")]


async def chat_completions(http, stream):
    tools = [{"type": "function", "function": FUNCTION}]
    answer = await posted(http, "/v1/chat/completions", messages=[USER], tools=tools, stream=stream)
    if not stream:
        [choice] = answer["choices"]
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        return message["content"] or "", list(map(json.loads, calls)), choice["finish_reason"] == "tool_calls"
    choices = [choice for chunk in answer for choice in chunk["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    written = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or []:
            written.setdefault(call["index"], []).append(call["function"]["arguments"])
    assert list(written) == list(range(len(written)))
    arguments = [loaded for parts in written.values() if (loaded := loads("".join(parts))) is not None]
    is_of_calls = choices[-1]["finish_reason"] == "tool_calls"
    assert not is_of_calls or len(arguments) == len(written)
    return content, arguments, is_of_calls


def loads(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


async def responses(http, stream):
    tools = [{"type": "function", **FUNCTION}]
    answer = await posted(http, "/v1/responses", input="Hi", tools=tools, stream=stream)
    if stream:
        done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        ends = [event for event in answer if event["type"] == "response.function_call_arguments.done"]
        finished = [event["arguments"] for event in ends]
        answer = answer[-1]["response"]
        assert answer["output"] == done
        assert finished == [
            item["arguments"] for item in done if item["status"] == "completed" and "name" in item
        ]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    complete = [json.loads(call["arguments"]) for call in calls if call["status"] == "completed"]
    assert stream or len(complete) == len(calls)
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    return "".join(texts), complete, None


async def messages(http, stream):
    tools = [{"name": "ping", "input_schema": SCHEMA}]
    answer = await posted(http, "/v1/messages", messages=[USER], tools=tools, max_tokens=500, stream=stream)
    if not stream:
        content = answer["content"]
        calls = [block["input"] for block in content if block["type"] == "tool_use"]
        texts = [block["text"] for block in content if block["type"] == "text"]
        return "".join(texts), calls, answer["stop_reason"] == "tool_use"
    deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
    content = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    written = {}
    for event in answer:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            written.setdefault(event["index"], []).append(event["delta"]["partial_json"])
    arguments = [loaded for parts in written.values() if (loaded := loads("".join(parts))) is not None]
    [stop] = [event["delta"]["stop_reason"] for event in answer if event["type"] == "message_delta"]
    assert stop != "tool_use" or len(arguments) == len(written)
    return content, arguments, stop == "tool_use"


async def ollama(http, stream):
    tools = [{"type": "function", "function": FUNCTION}]
    answer = await posted(http, "/api/chat", messages=[USER], tools=tools, stream=stream)
    told = [one["message"] for one in (answer if stream else [answer])]
    calls = [call["function"]["arguments"] for one in told for call in one.get("tool_calls") or []]
    return "".join(one["content"] for one in told), calls, None


@pytest.mark.parametrize("ask", [chat_completions, responses, messages, ollama])
@pytest.mark.parametrize(("call_format", "answer", "content", "arguments", "is_of_calls"), ANSWERS)
async def test_what_is_told_of_calls(http, llm, ask, answer, content, arguments, is_of_calls):
    llm.reply = answer
    for stream in (False, True):
        told = await ask(http, stream)
        assert told[:2] == (content, arguments)
        assert told[2] in (is_of_calls, None)


@pytest.mark.parametrize("call_format", ["hermes"])
async def test_a_call_that_a_stop_string_cuts_off_is_not_told_of(http, llm):
    llm.reply, llm.stop_reason = BAD[: BAD.index("NaN")], "NaN"
    for ask in (chat_completions, messages, ollama):
        content, arguments, is_of_calls = await ask(http, stream=False)
        assert (content, arguments, bool(is_of_calls)) == ("", [], False)


@pytest.mark.parametrize("call_format", ["hermes"])
async def test_a_call_that_is_cut_off_is_not_complete(http, llm):
    llm.reply = GOOD
    tools = [{"type": "function", **FUNCTION}]
    fields = {"input": "Hi", "tools": tools, "max_output_tokens": len(GOOD) - 16, "stream": False}
    [call] = (await posted(http, "/v1/responses", **fields))["output"]
    assert (call["arguments"], call["status"]) == ('{"a":', "incomplete")
