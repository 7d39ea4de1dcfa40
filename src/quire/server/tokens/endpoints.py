"""The endpoints for tokens in and out."""

from __future__ import annotations

from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.tokens.generate import GenerateRequest, generate
from quire.server.tokens.render import render_chat_completion, render_completion
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
)
from quire.server.wire.openapi import GENERATION_ERRORS, TOKENIZATION_ERRORS, Endpoint

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
