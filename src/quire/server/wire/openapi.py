"""The OpenAPI document, generated from the models of requests and answers, and its page at /docs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import jinja2
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from quire.server.wire.errors import OPENAI_ERRORS, ErrorShape
from quire.server.wire.paths import MONITORING_PATHS
from quire.server.wire.streaming import SERVER_SENT_EVENTS

_REF = "#/components/schemas/{}"
_JSON = "application/json"
_FORM = "multipart/form-data"
_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
_PARAMETER = re.compile(r"\{(\w+)\}")
PROMPT_ERRORS = {
    400: "The request is invalid; `param` is the field at fault.",
    404: "The model is not served here.",
    413: "The body is larger than the server's max_body_bytes.",
    415: "The body is not JSON.",
    503: "The engine is not available.",
}
TOKENIZATION_ERRORS = {
    **PROMPT_ERRORS,
    429: "Too many texts are waiting to be tokenized.",
    504: "The text was not tokenized in time.",
}
GENERATION_ERRORS = {
    **PROMPT_ERRORS,
    429: "The queue is full; see Retry-After.",
    499: "The request was aborted over /v1/requests.",
    500: "The request failed in the engine.",
    503: "The engine is not available, or the server is shutting down.",
    504: "The request timed out.",
}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One route: its request, answers and statuses."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]  # takes the request, and the body if there is one
    answer: type[msgspec.Struct] | None  # None: not JSON
    _: dataclasses.KW_ONLY
    body: type[BaseModel] | None = None
    form: type[BaseModel] | None = None  # body, if it is multipart/form-data; the handler reads it
    media_type: str = CONTENT_TYPE_LATEST  # media type of an answer that is not JSON
    answers_list: bool = False  # the answer is a list of `answer`, or without that of rows of numbers
    takes_any_type: bool = False  # the body is JSON regardless of its Content-Type
    event: type[msgspec.Struct] | None = None
    stream_type: str = SERVER_SENT_EVENTS  # media type of a stream of events
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    error_shape: ErrorShape = OPENAI_ERRORS
    failure: type[msgspec.Struct] | None = None  # body of answers with a status in `errors`, if not an error

    @property
    def error_answer(self) -> type[msgspec.Struct]:
        """Body of an error answer."""
        return self.failure or self.error_shape.answer

    @property
    def summary(self) -> str:
        """A one-sentence description."""
        return (self.handler.__doc__ or "").partition("\n")[0]

    @property
    def route_path(self) -> str:
        """The path as a route pattern; names of models and requests may contain slashes."""
        return _PARAMETER.sub(r"{\1:path}", self.path)


def openapi_document(endpoints: Sequence[Endpoint], version: str, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server with these routes, below `root_path`."""
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(endpoints),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    bodies = [body for endpoint in endpoints for body in (endpoint.body, endpoint.form) if body]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REF.format("{model}")
    )
    structs = [
        struct
        for endpoint in endpoints
        for struct in (endpoint.answer, endpoint.event, endpoint.error_answer)
        if struct is not None
    ]
    _, components = msgspec.json.schema_components(structs, ref_template=_REF.format("{name}"))
    return {**definitions["$defs"], **components}


def _content(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": _REF.format(struct.__name__)}}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answer is None:
        schema = _ROWS if endpoint.answers_list else {"type": "string"}
        content: dict[str, Any] = {endpoint.media_type: {"schema": schema}}
    else:
        content = _content(endpoint.answer)
        if endpoint.answers_list:
            content[_JSON]["schema"] = {"type": "array", "items": content[_JSON]["schema"]}
    if endpoint.event is not None:
        content[endpoint.stream_type] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, meaning in endpoint.errors.items():
        answers[str(status)] = {"description": meaning, "content": _content(endpoint.error_answer)}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": answers}
    if endpoint.path not in MONITORING_PATHS:
        operation["security"] = [{}, {"bearer": []}]
        answers["401"] = {
            "description": "The API key is missing or wrong.",
            "content": _content(endpoint.error_answer),
        }
    for media_type, body in ((_JSON, endpoint.body), (_FORM, endpoint.form)):
        if body is not None:
            schema = {"$ref": _REF.format(body.__name__)}
            operation["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    return operation


_LIMITS = {  # keywords of JSON schema, in reading order
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
    "pattern": "matching {}",
}


def docs_page(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    source = resources.files("quire.server").joinpath("docs_page.html").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(document=document, limits_in_words=limits_in_words, schema_name=_schema_name)


def limits_in_words(schema: dict[str, Any]) -> str:
    """Return the type and the limits of a field in words: `integer, at least 1, at most 128`."""
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return " or ".join(limits_in_words(form) for form in forms if form != {"type": "null"})
    if "$ref" in schema:
        return _schema_name(schema)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    if schema.get("type") == "null":
        return "not supported"
    limits = [words.format(schema[name]) for name, words in _LIMITS.items() if name in schema]
    return ", ".join([_type_of(schema), *limits])


def _type_of(schema: dict[str, Any]) -> str:
    if schema.get("type") == "array":
        return f"list of ({limits_in_words(schema.get('items', {}))})"
    return str(schema.get("type", "anything"))


def _schema_name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
