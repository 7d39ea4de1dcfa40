"""An engine whose answers a test writes, with a template that has a place for tools."""

from fake_llm import FakeLLM, FakeTokenizer

from quire.dialogue.messages import template_messages
from quire.models.text.message_content import joined_parts
from quire.status import FinishReason

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"
CALLS = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "}\\"é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


def shown(messages, call_format):
    """As the template gets them, which shows texts."""
    messages = template_messages(messages, call_format)
    return [{**message, "content": joined_parts(message["content"])} for message in messages]


class ScriptedTokenizer(FakeTokenizer):
    chat_template_source = TEMPLATE

    def added_token_id(self, text):
        return {"<tool_call>": 7}.get(text)


class ScriptedLLM(FakeLLM):
    reply = CALLS

    def __init__(self):
        super().__init__()
        self.tokenizer = ScriptedTokenizer()
        self.conversation = None

    def chat(self, messages, sampling_params, *, tools=None, marks=(), call_format=None, **options):
        messages = shown(messages, call_format)
        self.conversation = messages, tools, marks
        last = [{"role": "user", "content": messages[-1]["content"] or "call"}]
        return super().chat(last, sampling_params, **options)

    async def tokenize_chat(self, messages, *, tools=None, call_format=None, **options):
        self.conversation = shown(messages, call_format), tools, ()
        self.tokenize_options = options
        return list(range(len(messages)))

    def _tokens(self, params, index):
        text = self.reply if index == 0 else "No."
        tokens = [ord(character) for character in text]
        limit = params.max_tokens or len(text)
        reason = FinishReason.STOP if limit >= len(text) else FinishReason.LENGTH
        return tokens[:limit], (text[:limit], reason)
