"""Answers of /api, in Ollama's shapes."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from quire.server.wire.answers import TokenLogprob, encode
from quire.server.wire.errors import ApiError, ErrorShape

DoneReason = Literal["stop", "length", "load"]


class CalledTool(Struct, kw_only=True):
    """A called tool, with an object as arguments; `index` counts the calls of an answer from 0."""

    index: int
    name: str
    arguments: Raw


class OllamaToolCall(Struct, kw_only=True):
    """A call in a message; streams send it once it is complete."""

    id: str
    function: CalledTool


class OllamaAnswerMessage(Struct, kw_only=True):
    """An answer, or the new part of a streamed one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _Answer(Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChat(_Answer, kw_only=True):
    """Answer of /api/chat, and each line of its stream; the last has `done`, counts and nanoseconds."""

    message: OllamaAnswerMessage


class OllamaGeneration(_Answer, kw_only=True):
    """Answer of /api/generate, and each line of its stream; the last one as in a chat."""

    response: str
    thinking: str | UnsetType = UNSET


class ModelDetails(Struct, kw_only=True):
    """Details of the model; unknown ones are empty."""

    parent_model: str = ""
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class LocalModel(Struct, kw_only=True):
    """The served model under one of its names; `size` is the size of its weights in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class LocalModelList(Struct, kw_only=True):
    """Answer of /api/tags."""

    models: list[LocalModel]


class RunningModel(Struct, kw_only=True):
    """The served model; `context_length` is in tokens."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModelList(Struct, kw_only=True):
    """Answer of /api/ps."""

    models: list[RunningModel]


class ShownModel(Struct, kw_only=True):
    """Answer of /api/show; `template` is the chat template, in Jinja."""

    parameters: str
    template: str
    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]


class OllamaVersion(Struct, kw_only=True):
    """Answer of /api/version."""

    version: str


class ErrorText(Struct):
    """Body of every error answer, and last line of a failed stream."""

    error: str


def error_text(error: ApiError) -> ErrorText:
    """Return an error in Ollama's shape."""
    return ErrorText(error.message)


OLLAMA_ERRORS = ErrorShape(ErrorText, error_text, "/api/")


def json_line(answer: Struct) -> bytes:
    """Return one line of a stream."""
    return encode(answer) + b"\n"


def timestamp(seconds: float) -> str:
    """Return a time in Ollama's format, given in seconds since 1970."""
    time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")
