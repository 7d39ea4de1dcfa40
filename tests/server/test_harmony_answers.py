"""Harmony through each API, with real clients and answers that the test writes."""

import importlib
import json

import httpx
import httpx2
import openai
import pytest
from fake_llm import FakeTokenizer
from scripted_llm import ScriptedLLM

from quire.config import ServerConfig
from quire.dialogue.harmony_messages import MARKS
from quire.errors import ConfigError
from quire.server.app import create_app

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}Reasoning: {{ reasoning_effort }}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
)
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PING = {"type": "function", "function": {"name": "ping", "parameters": SCHEMA}}
ARGUMENTS = '{"city": "a <|call|> \\" b"}'
START = "<|start|>assistant"
REPLY = (
    f"<|channel|>analysis<|message|>Hm.<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>"
    f"{START}<|channel|>analysis<|message|>So?<|end|>"
    f"{START}<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{ARGUMENTS}"
)
NUM_REASONING_TOKENS = len("Hm.<|end|") + len("So?<|end|")  # one for each character; of marks, not the last
IDS = dict(zip(MARKS, range(900_000, 900_100), strict=False))


class HarmonyTokenizer(FakeTokenizer):
    eos_token_ids = (IDS["<|return|>"],)

    def __init__(self, template):
        self.chat_template_source = template

    def added_token_id(self, text):
        return IDS.get(text)


class HarmonyLLM(ScriptedLLM):
    reply = REPLY

    def __init__(self, template=TEMPLATE):
        super().__init__()
        self.tokenizer = HarmonyTokenizer(template)
        self.info.max_model_len = 1024


@pytest.fixture
def llm():
    return HarmonyLLM()


@pytest.fixture(scope="module")
def anthropic():
    """The package, which takes two seconds to import."""
    return importlib.import_module("anthropic")


@pytest.fixture
async def claude(app, anthropic):
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", http_client=http, max_retries=0
        )


def client_of(llm, **config):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(**config)))
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


async def create(client, **fields):
    asked = {"model": "fake", "messages": [USER], "tools": [PING], **fields}
    return await client.chat.completions.create(**asked)


async def test_a_chat_completion(client, llm):
    answer = await create(client)
    [choice] = answer.choices
    message = choice.message
    assert (message.reasoning_content, message.content) == ("Hm.\n\nSo?", "I look.")
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("ping", ARGUMENTS)
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS
    assert set(llm.conversation[2]) == set(MARKS)
    assert llm.seen[0].params.stop_token_ids == (IDS["<|call|>"],)  # the other ends a sequence already


async def test_a_streamed_chat_completion(client):
    said = {"reasoning": "", "content": "", "arguments": ""}
    async for chunk in await create(client, stream=True):
        for choice in chunk.choices:
            said["reasoning"] += getattr(choice.delta, "reasoning", "")
            said["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                said["arguments"] += call.function.arguments
    assert said == {"reasoning": "Hm.\n\nSo?", "content": "I look.", "arguments": ARGUMENTS}


async def test_without_tools_nothing_is_lost(client, llm):
    llm.reply = f"<|channel|>analysis<|message|>Hm.<|end|>{START}<|channel|>final<|message|>Yes."
    [choice] = (await create(client, tools=openai.NOT_GIVEN)).choices
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Yes.")


async def test_a_response(client):
    tool = {"type": "function", **PING["function"]}
    answer = await client.responses.create(model="fake", input="Hi", tools=[tool])
    assert [item.type for item in answer.output] == ["reasoning", "message", "reasoning", "function_call"]
    assert answer.output[0].content[0].text == "Hm."
    assert answer.output_text == "I look."
    assert answer.output[2].content[0].text.strip() == "So?"
    assert answer.output[3].arguments == ARGUMENTS
    stream = await client.responses.create(model="fake", input="Hi", tools=[tool], stream=True)
    [completed] = [event.response async for event in stream if event.type == "response.completed"]
    assert [item.type for item in completed.output] == [item.type for item in answer.output]


async def test_a_message(claude):
    tool = {"name": "ping", "input_schema": SCHEMA}
    fields = {"model": "fake", "max_tokens": 500, "messages": [USER], "tools": [tool]}
    answer = await claude.messages.create(**fields)
    assert [block.type for block in answer.content] == ["thinking", "text", "thinking", "tool_use"]
    assert answer.content[3].input == json.loads(ARGUMENTS)
    assert answer.stop_reason == "tool_use"
    async with claude.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == [block.type for block in answer.content]


@pytest.mark.parametrize(
    ("effort", "told"),
    [("none", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("max", "high")],
)
async def test_the_template_is_told_an_effort_that_the_models_know(client, llm, effort, told):
    await create(client, reasoning_effort=effort)
    assert llm.seen[0].options["chat_template_kwargs"] == {"reasoning_effort": told}


async def test_what_must_be_called_is_called_after_the_reasoning(client, llm):
    await create(client, tool_choice="required")
    seen = llm.seen[0]
    assert "commentary to=functions.ping " in seen.params.structured_outputs.grammar
    assert not seen.options["reasoning"].leads_to_content


@pytest.mark.parametrize("tools", [[PING], openai.NOT_GIVEN], ids=["tools", "no tools"])
async def test_after_a_budget_comes_content_or_a_call(client, llm, tools):
    await create(client, tools=tools, extra_body={"thinking_token_budget": 9})
    seen = llm.seen[0]
    assert seen.options["reasoning"].leads_to_content == (tools is openai.NOT_GIVEN)
    assert (seen.params.structured_outputs is None) == (tools is openai.NOT_GIVEN)


async def test_a_schema_is_enforced_in_the_content(client, llm):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    llm.reply = '<|channel|>final<|message|>{"city": "x"}'
    [choice] = (await create(client, tools=openai.NOT_GIVEN, response_format=form)).choices
    assert choice.message.content == '{"city": "x"}'
    assert llm.seen[0].options["reasoning"].leads_to_content


async def test_earlier_turns_have_what_the_template_takes(client, llm):
    first = (await create(client)).choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "20"}
    await create(client, messages=[USER, first, result])
    turn = llm.conversation[0][1]
    assert (turn["thinking"], turn["content"]) == ("Hm.\n\nSo?\n\nI look.", "")
    assert turn["tool_calls"][0]["function"]["arguments"] == json.loads(ARGUMENTS)


@pytest.mark.parametrize("field", ["tool_call_format", "reasoning_format"])
async def test_either_flag_sets_both_formats(field):
    llm = HarmonyLLM("{% if tools %}{{ tools }}{% endif %}")
    [choice] = (await create(client_of(llm, **{field: "harmony"}))).choices
    assert (choice.message.reasoning, choice.message.content) == ("Hm.\n\nSo?", "I look.")
    assert len(choice.message.tool_calls) == 1


async def test_without_a_reasoning_format_a_reasoning_is_content():
    [choice] = (await create(client_of(HarmonyLLM(), reasoning_format="none"))).choices
    assert choice.message.content == "Hm.\n\nI look.\n\nSo?"
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("config", "which"),
    [({"tool_call_format": "hermes"}, "reasoning"), ({"reasoning_format": "think"}, "calls")],
)
def test_only_one_of_the_formats_cannot_be_harmony(config, which):
    with pytest.raises(ConfigError, match=f"only the format of the model's {which} is harmony"):
        create_app(HarmonyLLM(), ServerConfig(**config))
