"""vLLM's POST /v1/completions/render and /v1/chat/completions/render: prompts as tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.openai.chat import ChatCall
from quire.server.openai.completions import CompletionCall
from quire.server.wire.answers import json_response


async def render_completion(request: Request, body: CompletionRequest) -> Response:
    """Return the prompts of a completion as tokens: bodies of /inference/v1/generate."""
    return json_response(await CompletionCall(request, body).rendered())


async def render_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Return the prompt of a chat completion as tokens: a body of /inference/v1/generate."""
    [rendered] = await ChatCall(request, body).rendered()
    return json_response(rendered)
