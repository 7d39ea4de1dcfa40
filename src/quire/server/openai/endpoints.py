"""The endpoints of OpenAI's completions, chat completions, embeddings and models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import context_of
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.completions import create_completion
from quire.server.openai.embeddings import EmbeddingRequest, create_embeddings
from quire.server.wire.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    EmbeddingList,
    ModelCard,
    ModelList,
    json_response,
)
from quire.server.wire.openapi import GENERATION_ERRORS, Endpoint


async def list_models(request: Request) -> Response:
    """List the served models under each of their names."""
    contexts = context_of(request).contexts
    return json_response(ModelList(data=[card for each in contexts for card in each.model_cards]))


async def get_model(request: Request) -> Response:
    """Describe a served model."""
    name = request.path_params["model"]
    return json_response(context_of(request).of_model(name).model_card(name))


COMPLETION_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        create_completion,
        Completion,
        body=CompletionRequest,
        event=Completion,
        errors=GENERATION_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        ChatCompletion,
        body=ChatCompletionRequest,
        event=ChatCompletionChunk,
        errors=GENERATION_ERRORS,
    ),
)
EMBEDDING_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        EmbeddingList,
        body=EmbeddingRequest,
        errors=GENERATION_ERRORS,
    ),
)

MODEL_ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, ModelList),
    Endpoint(
        "GET", "/v1/models/{model}", get_model, ModelCard, errors={404: "The model is not served here."}
    ),
)
