"""Reasoning in /v1/chat/completions, through the real openai client, with answers that the test writes."""

import httpx
import openai
import pytest
from fake_llm import FakeTokenizer
from scripted_llm import ScriptedLLM

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.wire.leniency import HEADER

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>{% if enable_thinking %}<think>\n{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
PING = {"type": "function", "function": {"name": "ping"}}
REASONING = "Hm, <tool_call>?"
CALL = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
REPLY = f"<think>\n{REASONING}\n</think>\n\nWell.\n{CALL}"


class ThinkingTokenizer(FakeTokenizer):
    def __init__(self, template):
        self.chat_template_source = template

    def added_token_id(self, text):
        return None


class ThinkingLLM(ScriptedLLM):
    reply = REPLY

    def __init__(self, template=TEMPLATE):
        super().__init__()
        self.tokenizer = ThinkingTokenizer(template)


@pytest.fixture
def llm():
    return ThinkingLLM()


async def create(client, **fields):
    return await client.chat.completions.create(**{"model": "fake", "messages": [USER], **fields})


def client_of(llm, **config):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(**config)))
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


async def test_reasoning_content_and_calls_apart(client, llm):
    answer = await create(client, tools=[PING])
    [choice] = answer.choices
    message = choice.message
    assert (message.reasoning_content, message.reasoning, message.content) == (REASONING, REASONING, "Well.")
    assert [call.function.name for call in message.tool_calls] == ["ping"]
    assert choice.finish_reason == "tool_calls"
    assert set(llm.conversation[2]) >= {"<think>", "</think>", "<tool_call>"}
    # a token for each character: of the end mark of several tokens, only the last does not count
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(f"\n{REASONING}\n</think>") - 1


async def test_a_stream_says_the_same(client):
    text = {"reasoning_content": "", "reasoning": "", "content": ""}
    order, names, usage = [], [], None
    stream = await create(client, tools=[PING], stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not choice.delta.content or choice.delta.model_extra == {}
            for field in text:
                if piece := getattr(choice.delta, field, None):
                    text[field] += piece
                    order.append(field)
            names += [call.function.name for call in choice.delta.tool_calls or [] if call.function.name]
    assert text == {"reasoning_content": REASONING, "reasoning": REASONING, "content": "Well."}
    assert order.index("content") == len(order) - order.count("content")
    assert names == ["ping"]
    assert usage.completion_tokens_details.reasoning_tokens > 0


async def test_a_reasoning_that_is_cut_off(client):
    choice = (await create(client, max_tokens=12)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning == "Hm,"


async def test_reasoning_can_be_left_out(client):
    message = (await create(client, extra_body={"include_reasoning": False})).choices[0].message
    assert message.content.startswith("Well.")
    assert message.model_extra == {}
    stream = await create(client, stream=True, extra_body={"include_reasoning": False})
    async for chunk in stream:
        assert all(choice.delta.model_extra == {} for choice in chunk.choices)


async def test_a_model_that_does_not_think_answers_as_before():
    llm = ThinkingLLM("no marks")
    answer = await create(client_of(llm))
    assert answer.choices[0].message.content == REPLY
    assert answer.usage.completion_tokens_details is None


async def test_the_format_can_be_set():
    assert (await create(client_of(ThinkingLLM(), reasoning_format="none"))).choices[
        0
    ].message.content == REPLY
    message = (await create(client_of(ThinkingLLM("no"), reasoning_format="think"))).choices[0].message
    assert message.reasoning == REASONING


async def test_what_an_earlier_answer_reasoning_reaches_the_template(client, llm):
    for field in ("reasoning_content", "reasoning"):
        await create(client, messages=[USER, {"role": "assistant", "content": "Yo", field: "Hm"}, USER])
        sent = llm.conversation[0][1]
        assert sent == {
            "role": "assistant", "content": "Yo", "reasoning_content": "Hm", "reasoning": "Hm",
            "thinking": "Hm",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True}),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False, "x": [1]}}},
         {"enable_thinking": False, "x": [1]}),
        ({"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
         {"enable_thinking": False}),
    ],
)  # fmt: skip
async def test_what_the_template_is_told(client, llm, fields, variables):
    await create(client, **fields)
    assert llm.seen[0].options.get("chat_template_kwargs") == variables


async def test_an_effort_reaches_a_template_that_knows_efforts():
    llm = ThinkingLLM("{{ reasoning_effort }}")
    await create(client_of(llm), reasoning_effort="low")
    assert llm.seen[0].options["chat_template_kwargs"] == {"reasoning_effort": "low"}


@pytest.mark.parametrize("effort", ["none", "high"])
async def test_an_effort_without_effect_is_named(effort):
    llm = ThinkingLLM("<think>")
    response = await client_of(llm).chat.completions.with_raw_response.create(
        model="fake", messages=[USER], reasoning_effort=effort
    )
    assert response.headers[HEADER] == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client_of(llm, strict=True), reasoning_effort=effort)
    assert caught.value.param == "reasoning_effort"


async def test_a_budget_and_its_message():
    llm = ThinkingLLM()
    client = client_of(llm, thinking_budget_message="Enough.")
    await create(client, extra_body={"thinking_token_budget": 9})
    control = llm.seen[0].options["reasoning"]
    assert (control.format.end, control.budget, control.budget_message) == ("</think>", 9, "Enough.")
    await create(client)
    assert "reasoning" not in llm.seen[1].options
    await create(client, response_format={"type": "json_object"})
    assert llm.seen[2].options["reasoning"].budget is None


async def test_a_budget_for_a_model_that_does_not_think():
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client_of(ThinkingLLM("no")), extra_body={"thinking_token_budget": 9})
    assert caught.value.param == "thinking_token_budget"


async def test_stop_strings_are_told_of_the_reasoning(client, llm):
    await create(client, stop=["Hm"])
    control = llm.seen[-1].options["reasoning"]
    assert (control.format.end, control.budget) == ("</think>", None)
    await create(client)
    assert "reasoning" not in llm.seen[-1].options
