"""Tools with the real engine: a random model, which calls tools because a grammar makes it."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

import preloaded
from checkpoints import make_checkpoint
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.config import ServerConfig
from quire.dialogue.harmony_messages import MARKS as HARMONY_MARKS
from quire.server.app import create_app

pytestmark = pytest.mark.processes

TEMPLATE = """{%- if tools %}<|im_start|>system
Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{%- for tool in tools %}
{{ tool.function | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", *HARMONY_MARKS)
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    first = max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"])) + 1
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": first + index, "content": mark} for index, mark in enumerate(MARKS)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def engine(model):
    with preloaded.engines():
        llm = AsyncLLM(
            EngineConfig(model=str(model), num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=128))
        )
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(params=["none"])
async def client(engine, request):
    config = ServerConfig(served_model_name=("random",), reasoning_format=request.param)
    app = create_app(engine, config)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
        yield openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )


async def create(client, **fields):
    asked = {"model": "random", "messages": [USER], "tools": [TOOL], "temperature": 1, "max_tokens": 200}
    return await client.chat.completions.create(**{**asked, **fields})


def require_valid(arguments):
    found = json.loads(arguments)
    assert found.keys() == {"city", "unit"}
    assert found["unit"] in ("C", "F")
    assert len(found["city"]) <= 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
async def test_a_call_that_must_be_made_and_its_result(client, choice):
    required = {"tool_choice": choice, "parallel_tool_calls": False}
    answer = await create(client, n=3, seed=1, **required)
    for one in answer.choices:
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        [call] = one.message.tool_calls
        assert call.function.name == "get"
        require_valid(call.function.arguments)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"}
    messages = [USER, message.model_dump(exclude_none=True), result]
    second = await create(client, messages=messages, max_tokens=4, extra_body={"min_tokens": 4})
    assert second.usage.prompt_tokens > answer.usage.prompt_tokens
    assert second.choices[0].finish_reason == "length"


async def test_a_stream_says_what_the_whole_answer_does(client):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "seed": 5}
    whole = await create(client, **fields)
    arguments = ["", ""]
    async for chunk in await create(client, stream=True, **fields):
        for one in chunk.choices:
            assert not one.delta.content
            for call in one.delta.tool_calls or []:
                arguments[one.index] += call.function.arguments
    assert arguments == [one.message.tool_calls[0].function.arguments for one in whole.choices]


async def test_a_schema_that_cannot_be_enforced_is_refused(client):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.parametrize("client", ["auto", "harmony"], indirect=True)
@pytest.mark.parametrize("required", [True, False], ids=["a call", "a schema"])
async def test_a_grammar_applies_after_the_reasoning_and_its_budget(client, required):
    schema = {"name": "s", "schema": TOOL["function"]["parameters"]}
    form = {"type": "json_schema", "json_schema": schema}
    structure = (
        {"tool_choice": "required"} if required else {"response_format": form, "tools": openai.NOT_GIVEN}
    )
    fields = {**structure, "n": 2, "seed": 3, "parallel_tool_calls": False if required else openai.NOT_GIVEN}
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7}
    answer = await create(client, extra_body=extra, **fields)
    written = [one.message.tool_calls[0].function.arguments if required else one.message.content
               for one in answer.choices]  # fmt: skip
    for arguments in written:
        require_valid(arguments)
    assert [bool(one.message.reasoning) for one in answer.choices] == [True, True]
    assert 2 * 7 <= answer.usage.completion_tokens_details.reasoning_tokens <= 2 * 8  # perhaps a line break
    told = [["", ""], ["", ""]]
    async for chunk in await create(client, stream=True, extra_body=extra, **fields):
        for one in chunk.choices:
            told[one.index][0] += getattr(one.delta, "reasoning", "")
            told[one.index][1] += one.delta.content or ""
            for call in one.delta.tool_calls or []:
                told[one.index][1] += call.function.arguments
    assert told == [[one.message.reasoning, text] for one, text in zip(answer.choices, written, strict=True)]


@pytest.mark.parametrize("client", ["harmony"], indirect=True)
@pytest.mark.parametrize("tools", [[TOOL], openai.NOT_GIVEN], ids=["tools", "no tools"])
@pytest.mark.parametrize("budget", [0, 6])
async def test_a_budget_in_harmony_is_followed_by_a_message(client, tools, budget):
    extra = {"thinking_token_budget": budget}
    answer = await create(client, tools=tools, max_tokens=60, seed=2, extra_body=extra)
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget
    [choice] = answer.choices
    assert bool(getattr(choice.message, "reasoning", None)) == bool(budget)
    assert choice.message.content or choice.message.tool_calls
    assert not any(mark in (choice.message.content or "") for mark in ("<|end|>", "<|start|>", "<|channel|>"))


@pytest.mark.parametrize("client", ["auto"], indirect=True)
async def test_a_budget_without_a_grammar(client):
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5, "min_tokens": 20}
    answer = await create(client, tools=openai.NOT_GIVEN, max_tokens=20, seed=2, extra_body=extra)
    assert answer.usage.completion_tokens_details.reasoning_tokens in (5, 6)
    assert answer.choices[0].message.content
    free = {"enable_thinking": False}
    answer = await create(client, max_tokens=4, extra_body={"chat_template_kwargs": free, "min_tokens": 4})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
