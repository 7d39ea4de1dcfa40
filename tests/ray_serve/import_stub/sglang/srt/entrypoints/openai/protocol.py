"""Not SGLang: only the names that let `ray.serve.llm` be imported without it, and take any body."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Any(BaseModel):
    model_config = ConfigDict(extra="allow")


class ChatCompletionRequest(_Any):
    model: str
    messages: list[dict[str, Any]]
    stream: bool = False


class CompletionRequest(_Any):
    model: str
    prompt: Any
    stream: bool = False


class TokenizeRequest(_Any):
    model: str
    prompt: str


class DetokenizeRequest(_Any):
    model: str
    tokens: list[int]


class EmbeddingRequest(_Any):
    model: str
    input: Any


class ScoringRequest(_Any):
    model: str


class ChatCompletionResponse(_Any): ...


class ChatCompletionStreamResponse(_Any): ...


class CompletionResponse(_Any): ...


class CompletionStreamResponse(_Any): ...


class DetokenizeResponse(_Any): ...


class EmbeddingResponse(_Any): ...


class ScoringResponse(_Any): ...


class TokenizeResponse(_Any): ...
