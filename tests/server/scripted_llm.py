"""An engine whose answers a test writes, with a template that has a place for tools."""

from fake_llm import FakeLLM, FakeTokenizer

from quire.status import FinishReason

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"
CALLS = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "}\\"é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


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

    def chat(self, messages, sampling_params, *, tools=None, marks=(), **options):
        self.conversation = messages, tools, marks
        last = [{"role": "user", "content": messages[-1]["content"] or "call"}]
        return super().chat(last, sampling_params, **options)

    async def tokenize_chat(self, messages, *, tools=None, **options):
        self.conversation = messages, tools, ()
        self.tokenize_options = options
        return list(range(len(messages)))

    def _tokens(self, params, index):
        text = self.reply if index == 0 else "No."
        tokens = [ord(character) for character in text]
        limit = params.max_tokens or len(text)
        reason = FinishReason.STOP if limit >= len(text) else FinishReason.LENGTH
        return tokens[:limit], (text[:limit], reason)
