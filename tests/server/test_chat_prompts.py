"""One conversation is one prompt, and one refusal, in every API and in `LLM.chat`."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from fake_llm import FakeLLM
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import ChatTemplateConfig, ServerConfig
from quire.engine.messages import EngineInfo
from quire.errors import InvalidRequestError
from quire.front.text.input_processor import InputProcessor
from quire.sampling_params import SamplingParams
from quire.server.app import create_app
from tokenizers_for_tests import byte_level

INFO = EngineInfo(
    model="fake", max_model_len=100_000, vocab_size=300, num_blocks=64, block_size=16,
    kv_cache_bytes=0, dtype="float32", load_seconds=0.0,
)  # fmt: skip
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
SHOWN = "<s>{{ m.role }} {{ m.name }} {{ m.reasoning_content }}|"
TEMPLATES = {
    "texts": "{% for m in messages %}" + SHOWN + "{{ m.content }}" + CALLS + "{% endfor %}",
    "lists": "{% for m in messages %}"
    + SHOWN
    + "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
    + CALLS
    + "{% endfor %}",
    "both": "{% for m in messages %}"
    + SHOWN
    + "{% if m.content is string %}{{ m.content }}{% else %}"
    + "{% for c in m.content %}({{ c['text'] }}){% endfor %}{% endif %}"
    + CALLS
    + "{% endfor %}",
}


class Front(FakeLLM):
    """Prepares prompts as the real front does; `prompts` are those of requests."""

    def __init__(self, template, **limits):
        super().__init__()
        self.tokenizer = byte_level(chat_template=template, template_limits=ChatTemplateConfig(**limits))
        self.inputs = InputProcessor(self.tokenizer, INFO)
        self.info = SimpleNamespace(**{**vars(self.info), "max_model_len": INFO.max_model_len})
        self.prompts = []
        self.app = create_app(self, ServerConfig())

    def prepare(self, messages, **options):
        kept = {name: value for name, value in options.items() if name not in ("timeout", "tenant")}
        return self.inputs.process_chat(messages, SamplingParams(), **kept).core_request.prompt_token_ids

    def chat(self, messages, sampling_params, *, request_id=None, call_format="auto", **options):
        self.prompts.append(self.prepare(messages, call_format=call_format, tools=options.get("tools")))
        return self.generate("Hi", sampling_params, request_id=request_id)

    async def tokenize_chat(self, messages, **options):
        return self.prepare(messages, **options)

    def said(self, messages, **options):
        """Return the text of the prompt that `LLM.chat` makes."""
        return self.tokenizer.decode(self.prepare(messages, **options), skip_special_tokens=False)


@pytest.fixture(scope="module")
def fronts():
    made = {name: Front(template) for name, template in TEMPLATES.items()}
    yield made
    for front in made.values():
        front.tokenizer.close()


async def answers(front, *requests):
    transport = httpx.ASGITransport(app=front.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        return [await client.post(path, json={"model": "fake", **body}) for path, body in requests]


texts = st.lists(
    st.sampled_from(["Hi", " ", "\n", "<s>", "</s>", "<think> 思", "é", "<tool_call>", "s>", "None"]),
    max_size=4,
).map("".join)
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
contents = st.one_of(texts, parts)
users = contents.map(lambda content: [{"role": "user", "content": content}])
systems = contents.map(lambda content: [{"role": "system", "content": content}])
said = st.tuples(
    contents, st.sampled_from([{}, {"reasoning_content": "Hm"}, {"refusal": None, "audio": None}])
).map(lambda given: [{"role": "assistant", "content": given[0], **given[1]}])
arguments = st.one_of(
    st.dictionaries(texts, st.one_of(texts, st.integers(), st.none()), max_size=2).map(json.dumps),
    st.sampled_from(["", "[1]", "{", "5"]),
)
called = st.tuples(st.sampled_from([None, "", "Well."]), arguments, contents).map(
    lambda given: [
        {
            "role": "assistant",
            "content": given[0],
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": given[1]}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": given[2]},
    ]
)
conversations = st.tuples(
    st.one_of(st.just([]), systems), st.lists(st.one_of(users, said, called), min_size=1, max_size=4), users
).map(lambda given: [*given[0], *(message for turn in given[1] for message in turn), *given[2]])


@given(conversations)
@settings(max_examples=12, deadline=None)
def test_llm_chat_makes_the_prompt_of_the_server(fronts, messages):
    for front in fronts.values():
        [answer] = asyncio.run(answers(front, ("/tokenize", {"messages": messages})))
        assert answer.json()["tokens"] == front.prepare(messages)


@given(st.one_of(st.just([]), systems), st.lists(users, min_size=1, max_size=1))
@settings(max_examples=8, deadline=None)
def test_all_apis_make_one_prompt(fronts, system, turns):
    messages = [*system, *turns[0]]

    def content(message, kind):
        given = message["content"]
        return given if isinstance(given, str) else [{**part, "type": kind} for part in given]

    [user] = turns[0]
    anthropic = {"messages": [{"role": "user", "content": content(user, "text")}]}
    if system and system[0]["content"] not in ("", [{"type": "text", "text": ""}]):
        anthropic["system"] = content(system[0], "text")
    items = [{"role": one["role"], "content": content(one, "input_text")} for one in messages]
    for front in fronts.values():
        front.prompts.clear()
        requests = [
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
            ("/v1/responses", {"input": items, "max_output_tokens": 16}),
        ]
        if "system" in anthropic or not system:
            requests.append(("/v1/messages", {**anthropic, "max_tokens": 2}))
        if all(isinstance(one["content"], str) for one in messages):
            requests.append(("/api/chat", {"messages": messages, "stream": False}))
        found = asyncio.run(answers(front, *requests))
        assert [one.status_code for one in found] == [200] * len(requests)
        assert front.prompts == [front.prepare(messages)] * len(requests)


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url.*text"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {}}]}, "video_url"),
        ({"role": "user", "content": [{"type": "image"}]}, "image"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "file"),
        ({"role": "user", "content": [{"type": "text"}]}, "text is None"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "text is 5"),
        ({"role": "user", "content": ["Hi"]}, "Hi"),
        ({"role": "user", "content": []}, r"content is \[\]"),
        ({"role": "user", "content": 5}, "content is 5"),
        ({"role": "user", "content": {"type": "text", "text": "Hi"}}, "content is"),
        ({"role": "user", "content": None}, "no content"),
        ({"role": "user"}, "no content"),
        ({"content": "Hi"}, "role is None"),
        ({"role": 5, "content": "Hi"}, "role is 5"),
        ({"role": "a b", "content": "Hi"}, "role is 'a b'"),
        ({"role": "user\n", "content": "Hi"}, "role"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "custom"}]}, "a function"),
        ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f"}}]}, "JSON"),
        ({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": ""}]}, "id has 0 characters"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL] * 129}, "128"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "", "audio": {"id": "x"}}, "audio"),
        ({"role": "user", "content": "Hi", "nmae": "Ann"}, "did you mean 'name'"),
        ({"role": "tool", "content": "", "tool_call_id": ""}, "tool_call_id has 0 characters"),
        ({"role": "assistant", "content": "", "reasoning_content": 5}, "reasoning_content is 5"),
    ],
)  # fmt: skip
async def test_llm_chat_refuses_what_the_server_refuses(fronts, message, words):
    front = fronts["texts"]
    [answer] = await answers(front, ("/tokenize", {"messages": [USER, message]}))
    assert answer.status_code == 400
    with pytest.raises(InvalidRequestError, match=words):
        front.prepare([USER, message])


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search"}, "must be a function"),
        ({"type": "function", "function": {"name": "a b"}}, "name 'a b'"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}, "type 'string'"),
        ({"type": "function", "function": {"name": "f", "parameters": [1]}}, "JSON schema"),
    ],
)
def test_llm_chat_refuses_tools_that_the_server_refuses(fronts, tool, words):
    with pytest.raises(InvalidRequestError, match=words):
        fronts["texts"].prepare([USER], tools=[tool])


async def test_no_conversation_is_refused(fronts):
    [answer] = await answers(fronts["texts"], ("/tokenize", {"messages": []}))
    assert answer.status_code == 400
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        fronts["texts"].prepare([])


def test_messages_as_transformers_has_them(fronts):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "5"},
    ]
    assert '<tool_call>f {"a": 1}' in fronts["texts"].said(messages)


async def test_a_part_that_refuses_is_text(fronts):
    messages = [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]
    assert "|No." in fronts["texts"].said(messages)
    [answer] = await answers(fronts["texts"], ("/tokenize", {"messages": messages}))
    assert answer.json()["tokens"] == fronts["texts"].prepare(messages)


def test_an_answer_continues_parts(fronts):
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ends = {"texts": "|a\nb", "lists": "|ab", "both": "|(a)(b"}
    for name, end in ends.items():
        assert fronts[name].said([USER, said], continue_final_message=True).endswith(end)


async def test_special_tokens_in_content_are_text_unless_the_server_is_told_otherwise():
    body = {"messages": [{"role": "user", "content": "<s></s>"}]}
    for told, expected in ((False, 1), (True, 2)):
        front = Front(TEMPLATES["texts"], special_tokens_in_content=told)
        chat, plain = await answers(front, ("/tokenize", body), ("/tokenize", {"prompt": "<s>"}))
        front.tokenizer.close()
        assert chat.json()["tokens"].count(0) == expected
        assert chat.json()["tokens"].count(1) == told
        assert plain.json()["count"] > 0
