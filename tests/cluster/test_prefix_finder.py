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

    def num_cached(self, digests):
        return len(digests)


async def digests(finder, path, **fields):
    body = json.dumps({"model": "m", **fields}).encode()
    found = await finder.find(path, body, len(body), [Blocks()])
    return found.digests[4]


async def test_a_conversation_with_tools_is_the_text_that_engines_make_of_it():
    tokenizer = byte_level(chat_template=TEMPLATE)
    finder = PrefixFinder(tokenizer, timeout=60)
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
