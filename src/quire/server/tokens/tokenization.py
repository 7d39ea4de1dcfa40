"""vLLM's POST /tokenize and /detokenize, and GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.sampling_params import TokenId
from quire.server.calls.bodies import PromptFields
from quire.server.calls.conversation import Conversation
from quire.server.calls.reasoning import Thinking
from quire.server.calls.tool_fields import Tools, tool_use_of
from quire.server.context import ServerContext, context_of
from quire.server.openai.chat_messages import ChatMessage
from quire.server.wire.answers import AddedToken, DetokenizedText, TokenizerInfo, Tokens, json_response
from quire.server.wire.strict_model import JsonObject, StrictModel

NAMES_PER_TURN = 2_000
"""Tokens spelled per turn of the event loop."""


class TokenizeRequest(PromptFields):
    """Body of POST /tokenize: a text, or a conversation for the chat template."""

    model: str | None = Field(None, description="The served model's name. Default: the only one.")
    prompt: str | None = Field(None, description="The text.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = Field(
        None, description="The conversation."
    )
    return_token_strs: bool | None = Field(
        None, description="Return the tokens as the vocabulary spells them, too."
    )
    tools: Tools | None = Field(None, description="Tools that the model may call; at most 128.")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )

    @model_validator(mode="after")
    def _require_one_form(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("form", "it must have either a prompt or messages")
        return self

    @override
    def tool_use(self) -> ToolUse | None:
        return tool_use_of(self.tools, None, parallel_tool_calls=None)

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        return [message.as_given() for message in self.messages or ()]

    @override
    def thinking_options(self) -> Thinking:
        return Thinking(template_kwargs=self.chat_template_kwargs or {})


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="The served model's name. Default: the only one.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="Token ids.")


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the tokens of a text, or of a conversation's prompt."""
    context = context_of(request).of_model(body.model)
    if body.prompt is None:
        tokens = await Conversation(context, body, body.given_messages()).prompt_tokens()
    else:
        adds = body.add_special_tokens is not False
        tokens = await context.llm.tokenize(body.prompt, add_special_tokens=adds)
    return json_response(
        Tokens(
            count=len(tokens),
            max_model_len=context.llm.info.max_model_len,
            tokens=tokens,
            token_strs=await _names_of(context, tokens) if body.return_token_strs else None,
        )
    )


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of tokens, including special tokens."""
    context = context_of(request).of_model(body.model)
    return json_response(DetokenizedText(prompt=await context.llm.detokenize(body.tokens)))


async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer, its added tokens and the chat template."""
    context = context_of(request).of_model(request.query_params.get("model"))
    tokenizer = context.llm.tokenizer
    named = tokenizer.special_tokens
    return json_response(
        TokenizerInfo(
            model_max_length=context.llm.info.max_model_len,
            vocab_size=tokenizer.vocab_size,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            unk_token=named.get("unk_token"),
            pad_token=named.get("pad_token"),
            added_tokens_decoder={
                str(token_id): AddedToken(content=text, special=token_id in tokenizer.special_token_ids)
                for text, token_id in tokenizer.added_tokens.items()
            },
            chat_template=tokenizer.chat_template_source,
        )
    )


async def _names_of(context: ServerContext, tokens: list[int]) -> list[str]:
    names: list[str] = []
    for start in range(0, len(tokens), NAMES_PER_TURN):
        names += map(context.llm.tokenizer.token_name, tokens[start : start + NAMES_PER_TURN])
        await asyncio.sleep(0)
    return names
