"""The routes of Ollama's API."""

from __future__ import annotations

from quire.server.ollama.answers import (
    OLLAMA_ERRORS,
    LocalModelList,
    OllamaChat,
    OllamaGeneration,
    OllamaVersion,
    RunningModelList,
    ShownModel,
)
from quire.server.ollama.body import OllamaChatRequest, OllamaGenerateRequest
from quire.server.ollama.call import chat, generate
from quire.server.ollama.models import (
    ShowRequest,
    list_local_models,
    list_running_models,
    ollama_version,
    show_model,
)
from quire.server.wire.openapi import GENERATION_ERRORS, PROMPT_ERRORS, Endpoint
from quire.server.wire.streaming import JSON_LINES

OLLAMA_ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/chat",
        handler=chat,
        body=OllamaChatRequest,
        takes_any_type=True,
        answer=OllamaChat,
        event=OllamaChat,
        stream_type=JSON_LINES,
        errors=GENERATION_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/api/generate",
        handler=generate,
        body=OllamaGenerateRequest,
        takes_any_type=True,
        answer=OllamaGeneration,
        event=OllamaGeneration,
        stream_type=JSON_LINES,
        errors=GENERATION_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/api/show",
        handler=show_model,
        body=ShowRequest,
        takes_any_type=True,
        answer=ShownModel,
        errors=PROMPT_ERRORS,
        error_shape=OLLAMA_ERRORS,
    ),
    *(
        Endpoint(method="GET", path=path, handler=handler, answer=answer, error_shape=OLLAMA_ERRORS)
        for path, handler, answer in (
            ("/api/tags", list_local_models, LocalModelList),
            ("/api/ps", list_running_models, RunningModelList),
            ("/api/version", ollama_version, OllamaVersion),
        )
    ),
)
