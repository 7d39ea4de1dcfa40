"""/v1/responses through the real openai client, with answers that the test writes."""

import json

import openai
import pytest
from scripted_llm import CALLS, ScriptedLLM

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "", "parameters": PARAMETERS}
PING = {"type": "function", "name": "ping", "parameters": {"type": "object"}}


@pytest.fixture
def llm():
    return ScriptedLLM()


async def create(client, **fields):
    return await client.responses.create(
        **{"model": "fake", "input": "Hi", "tools": [WEATHER, PING], **fields}
    )


async def refused(client, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, **fields)
    return caught.value.message


def shown(item):
    return (item.content[0].text,) if item.type == "message" else (item.name, item.arguments)


async def test_a_plain_answer(client, llm):
    llm.reply = "It is warm."
    answer = await create(
        client, tools=[], temperature=0.5, top_p=0.9, max_output_tokens=50, metadata={"a": "b"}, user="me"
    )
    assert answer.output_text == "It is warm."
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "fake")
    assert answer.id.startswith("resp_")
    assert (answer.metadata, answer.user, answer.temperature, answer.tools) == ({"a": "b"}, "me", 0.5, [])
    usage = answer.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (3, 3)
    assert (usage.output_tokens, usage.total_tokens) == (len(llm.reply), len(llm.reply) + 3)
    seen = llm.seen[0]
    assert (seen.params.temperature, seen.params.top_p, seen.params.max_tokens) == (0.5, 0.9, 50)
    assert seen.options["tenant"] == "me"


async def test_text_and_two_calls(client, llm):
    answer = await create(client)
    said, first, second = answer.output
    assert said.content[0].text == "Well."
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call", "get_weather", {"city": '}"é'},
    )  # fmt: skip
    assert (second.name, second.arguments, second.status) == ("ping", "{}", "completed")
    assert first.call_id.startswith("call_")
    assert first.call_id != second.call_id
    assert answer.status == "completed"
    messages, tools, _ = llm.conversation
    assert messages == [{"role": "user", "content": "Hi"}]
    assert tools[0]["function"]["parameters"] == PARAMETERS


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("limit", range(1, len(CALLS) + 1, 6))
async def test_a_stream_says_what_the_whole_answer_says(client, limit):
    whole = await create(client, max_output_tokens=limit)
    async with client.responses.stream(
        model="fake", input="Hi", tools=[WEATHER, PING], max_output_tokens=limit
    ) as stream:
        events = [event async for event in stream]
    final = events[-1].response
    assert list(map(shown, final.output)) == list(map(shown, whole.output))
    assert [item.status for item in final.output] == [item.status for item in whole.output]
    assert (final.status, final.usage.output_tokens) == (whole.status, limit)
    is_cut_off = limit < len(CALLS)
    assert final.status == ("incomplete" if is_cut_off else "completed")
    assert (final.incomplete_details is not None) == is_cut_off


async def raw_events(http, **fields):
    body = {"model": "fake", "input": "Hi", "tools": [WEATHER, PING], "stream": True, **fields}
    answer = await http.post("/v1/responses", json=body)
    lines = answer.text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_events_come_in_openais_order(http):
    events = await raw_events(http)
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_deltas = [kind for kind in kinds if not kind.endswith("delta")]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert without_deltas == [
        "created", "in_progress",
        "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [(item["id"], item["type"]) for item in added] == [(item["id"], item["type"]) for item in done]
    assert events[-1]["response"]["output"] == done
    for index, item in enumerate(done):
        deltas = [event["delta"] for event in events if "delta" in event and event["output_index"] == index]
        written = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert "".join(deltas) == written
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in done}


async def test_logprobs_of_the_text(client, http, llm):
    llm.reply = "Yes."
    fields = {"tools": [], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await create(client, **fields)
    [part] = answer.output[0].content
    assert [entry.token for entry in part.logprobs] == list("Yes.")
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    events = await raw_events(http, **fields)
    streamed = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for entries in streamed for entry in entries] == list("Yes.")


async def test_a_reasoning_is_an_item_before_the_others(client, http, llm):
    llm.tokenizer.chat_template_source += "<think>{% if enable_thinking %}"
    llm.reply = f"<think>\nHm, hm.\n</think>\n\n{CALLS}"
    answer = await create(client, reasoning={"effort": "high"})
    reasoning, *others = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm, hm.", [])
    assert [item.type for item in others] == ["message", "function_call", "function_call"]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert llm.seen[-1].options["chat_template_kwargs"] == {"enable_thinking": True}
    events = await raw_events(http)
    about_reasoning = [event for event in events if event.get("output_index") == 0]
    kinds = [event["type"].removeprefix("response.") for event in about_reasoning]
    assert list(dict.fromkeys(kinds)) == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in about_reasoning if "delta" in event) == "Hm, hm."
    await create(
        client,
        input=[{"role": "user", "content": "Hi"}, reasoning.to_dict(), {"role": "user", "content": "So?"}],
    )
    assert llm.conversation[0][1]["reasoning_content"] == "Hm, hm."


async def test_a_whole_conversation(client, llm):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Is it ", "warm?")]},
        {
            "type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{"type": "reasoning_text", "text": "Ask."}],
        },
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather",
            "arguments": '{"city": "Rome"}',
        },
        {"type": "function_call", "call_id": "c2", "name": "ping", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "Warm."},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "pong"}]},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    await create(client, instructions="Be brief.", input=items)

    def call(call_id, name, arguments):
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert llm.conversation[0] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Is it \nwarm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Ask."),
            "tool_calls": [call("c1", "get_weather", {"city": "Rome"}), call("c2", "ping", {})],
        },
        {"role": "tool", "content": "Warm.", "tool_call_id": "c1", "name": "get_weather"},
        {"role": "tool", "content": "pong", "tool_call_id": "c2", "name": "ping"},
        {"role": "user", "content": "So?"},
    ]


async def test_turns_of_the_model_are_not_run_together(client, llm):
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c1", "name": "ping", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "pong"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "system", "content": "Stop."},
    ]
    await create(client, input=[*items, {"role": "user", "content": "So?"}])
    assert [(one["role"], one["content"]) for one in llm.conversation[0]] == [
        ("user", "Hi"), ("assistant", ""), ("tool", "pong"), ("assistant", "Done."), ("assistant", "Really."),
        ("system", "Stop."), ("user", "So?"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ("auto", False),
        ("required", True),
        ({"type": "function", "name": "ping"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ping"}]}, True),
    ],
)
async def test_choices_of_tools(client, llm, choice, has_grammar):
    answer = await create(client, tool_choice=choice)
    assert (llm.seen[0].params.structured_outputs is not None) == has_grammar
    assert answer.model_dump()["tool_choice"] == choice


async def test_no_tool_is_called_if_none_may_be(client):
    assert (await create(client, tool_choice="none")).output_text == CALLS


async def test_an_answer_of_a_schema(client, llm):
    form = {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}
    answer = await create(client, tools=[], text={"format": form, "verbosity": "low"})
    assert json.loads(llm.seen[0].params.structured_outputs.json) == PARAMETERS
    assert answer.text.format.schema_ == PARAMETERS


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "images, audio",
        ),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "run on the server"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [PING, PING]}, "'ping' twice"),
        ({"tool_choice": {"type": "function", "name": "pong"}}, "'pong'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
        ({"top_logprobs": 2}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation"),
    ],
)
async def test_refusals(client, fields, words):
    assert words in await refused(client, **fields)


async def test_errors(client):
    with pytest.raises(openai.RateLimitError):
        await create(client, input="queue")
    with pytest.raises(openai.NotFoundError):
        await create(client, model="other")


async def test_a_failure_within_a_stream(client):
    *_, error, failed = [event async for event in await create(client, input="fail", stream=True)]
    assert (error.type, error.code) == ("error", "generation_failed")
    assert "NaN" in error.message
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.message == error.message


async def test_what_has_no_effect_is_named(http):
    reasoning = {"summary": "detailed", "effort": "low"}
    body = {"model": "fake", "input": "Hi", "reasoning": reasoning, "service_tier": "flex"}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Parameters"] == "service_tier, reasoning.summary, reasoning.effort"
