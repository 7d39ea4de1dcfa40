"""What the router takes a request's prompt to be."""

from __future__ import annotations

import json

from quire.cluster.prefixes.finder import PrefixFinder
from tokenizers_for_tests import byte_level

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for one in messages %}{{ one.role }}: {{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "f"}}


class Blocks:
    block_size = 4

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def num_cached(self, digests):
        return len(digests)


async def digests(finder, path, engines=None, **fields):
    body = json.dumps({"model": "m", **fields}).encode()
    engines = list(map(Blocks, finder.tokenizers)) if engines is None else engines
    found = await finder.find(path, body, len(body), engines)
    assert [*found.num_bytes] == [one for one in engines if one.tokenizer == engines[0].tokenizer]
    return found.digests[4]


async def test_a_conversation_with_tools_is_the_text_that_engines_make_of_it():
    tokenizer = byte_level(chat_template=TEMPLATE)
    finder = PrefixFinder([tokenizer], timeout=60)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    path = "/v1/chat/completions"
    try:
        for tools, choice, told in (([TOOL], "auto", "<tool_call>f"), ([TOOL], "none", ""), ([], "auto", "")):
            found = await digests(finder, path, messages=messages, tools=tools, tool_choice=choice)
            text = f"{told}user: Hiassistant: Oslotool: rain"
            assert found == await digests(finder, "/v1/completions", prompt=text)
    finally:
        finder.close()
        tokenizer.close()


async def test_a_prompt_has_the_tokens_of_its_engines_tokenizer():
    tokenizers = [byte_level(), byte_level(chat_template=TEMPLATE)]
    finder = PrefixFinder(tokenizers, timeout=60)
    engines = [Blocks(tokenizer.fingerprint) for tokenizer in tokenizers]
    try:
        chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "What is it?"}]}
        text = {"path": "/v1/completions", "prompt": "user: What is it?"}
        assert await digests(finder, engines=engines[1:], **chat) == await digests(finder, **text)
        body = json.dumps({"model": "m", "messages": chat["messages"]}).encode()
        assert await finder.find(chat["path"], body, len(body), engines) is None  # it has no chat template
    finally:
        finder.close()
        for tokenizer in tokenizers:
            tokenizer.close()
