"""The endpoints for tokens in and out, and vLLM's rendering of prompts as tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.openai.chat import ChatCall
from quire.server.openai.completions import CompletionCall
from quire.server.tokens.generate import GenerateRequest, generate
from quire.server.tokens.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from quire.server.wire.answers import (
    DetokenizedText,
    GeneratedTokens,
    GeneratedTokensEvent,
    RenderedRequest,
    TokenizerInfo,
    Tokens,
    json_response,
)
from quire.server.wire.openapi import GENERATION_ERRORS, TOKENIZATION_ERRORS, Endpoint


async def render_completion(request: Request, body: CompletionRequest) -> Response:
    """Return the prompts of a completion as tokens: bodies of /inference/v1/generate."""
    return json_response(await CompletionCall(request, body).rendered())


async def render_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Return the prompt of a chat completion as tokens: a body of /inference/v1/generate."""
    [rendered] = await ChatCall(request, body).rendered()
    return json_response(rendered)


TOKEN_ENDPOINTS = (
    Endpoint("POST", "/tokenize", tokenize, Tokens, body=TokenizeRequest, errors=TOKENIZATION_ERRORS),
    Endpoint(
        "POST", "/detokenize", detokenize, DetokenizedText, body=DetokenizeRequest, errors=TOKENIZATION_ERRORS
    ),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, TokenizerInfo),
    Endpoint(
        "POST",
        "/v1/completions/render",
        render_completion,
        RenderedRequest,
        answers_list=True,
        body=CompletionRequest,
        errors=TOKENIZATION_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions/render",
        render_chat_completion,
        RenderedRequest,
        body=ChatCompletionRequest,
        errors=TOKENIZATION_ERRORS,
    ),
    Endpoint(
        "POST",
        "/inference/v1/generate",
        generate,
        GeneratedTokens,
        body=GenerateRequest,
        event=GeneratedTokensEvent,
        errors=GENERATION_ERRORS,
    ),
)
