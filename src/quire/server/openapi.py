"""The OpenAPI document, from the models that requests are checked with and answers are built of."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quire.server import responses
from quire.server.protocol import ChatCompletionRequest, CompletionRequest

_REF = "#/components/schemas/{}"
_JSON = "application/json"
_PARAMETER = re.compile(r"\{(\w+)\}")
_GENERATION_ERRORS = {
    400: "The request can never be served as written.",
    404: "The model is not served here.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; see Retry-After.",
    500: "The request failed.",
    503: "The engine is not available, or the server is shutting down.",
    504: "The request's time was up.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route: what goes in, what comes out, and with which statuses."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None  # None: not JSON
    body: type[BaseModel] | None = None
    event: type[msgspec.Struct] | None = None
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    error_answer: type[msgspec.Struct] = responses.ErrorResponse

    @property
    def route_path(self) -> str:
        """The path as the router wants it; the names of models and requests may contain slashes."""
        return _PARAMETER.sub(r"{\1:path}", self.path)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        summary="Continue one or several prompts.",
        body=CompletionRequest,
        answer=responses.Completion,
        event=responses.Completion,
        errors=_GENERATION_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        body=ChatCompletionRequest,
        answer=responses.ChatCompletion,
        event=responses.ChatCompletionChunk,
        errors=_GENERATION_ERRORS,
    ),
    Endpoint(method="GET", path="/v1/models", summary="List the served model.", answer=responses.ModelList),
    Endpoint(
        method="GET",
        path="/v1/models/{model}",
        summary="Describe the served model.",
        answer=responses.ModelCard,
        errors={404: "The model is not served here."},
    ),
    Endpoint(
        method="GET",
        path="/v1/requests",
        summary="List the requests that are being served, with what each does or waits for.",
        answer=responses.RequestList,
        errors={503: "The engine is not available."},
    ),
    Endpoint(
        method="GET",
        path="/v1/requests/{request_id}",
        summary="Tell what a request does or waits for.",
        answer=responses.RequestState,
        errors={404: "No such request is being served.", 503: "The engine is not available."},
    ),
    Endpoint(
        method="GET",
        path="/health",
        summary="Tell whether requests can be served.",
        answer=responses.Health,
        errors={503: "The engine is not available, or the server is shutting down."},
        error_answer=responses.Health,
    ),
    Endpoint(method="GET", path="/metrics", summary="Metrics in the Prometheus text format.", answer=None),
    Endpoint(method="GET", path="/version", summary="Quire's version.", answer=responses.Version),
)


def openapi_document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server."""
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> dict[str, Any]:
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REF.format("{model}")
    )
    structs = [
        struct
        for endpoint in ENDPOINTS
        for struct in (endpoint.answer, endpoint.event, endpoint.error_answer)
        if struct is not None
    ]
    _, components = msgspec.json.schema_components(structs, ref_template=_REF.format("{name}"))
    return {**definitions["$defs"], **components}


def _content(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": _REF.format(struct.__name__)}}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        content: dict[str, Any] = {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}
    else:
        content = _content(endpoint.answer)
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, meaning in endpoint.errors.items():
        answers[str(status)] = {"description": meaning, "content": _content(endpoint.error_answer)}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": answers}
    if endpoint.path not in ("/health", "/metrics"):
        operation["security"] = [{}, {"bearer": []}]
        answers["401"] = {
            "description": "The API key is missing or wrong.",
            "content": _content(responses.ErrorResponse),
        }
    if endpoint.body is not None:
        schema = {"$ref": _REF.format(endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation
