"""The OpenAPI document, and schemathesis against the server it describes."""

import json
import re

import pytest
import schemathesis
from fake_llm import FakeLLM
from hypothesis import HealthCheck, Phase, given, settings
from live_server import served
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quire.config import BatchConfig, ServerConfig
from quire.server.app import ENDPOINTS, create_app
from quire.server.serve import start_state
from quire.server.wire.openapi import limits_in_words, openapi_document
from unmutated import UNMUTATED

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    batches = BatchConfig(batch_dir=str(tmp_path_factory.mktemp("batches")))
    app = create_app(FakeLLM(), ServerConfig(batches=batches))
    with served(app, start=lambda: start_state(app)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


SETTINGS = {
    "max_examples": 12,
    "backend": UNMUTATED,
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate],  # shrinking a case of this schema takes minutes
    "suppress_health_check": list(HealthCheck),
}
STREAMS = ("text/event-stream", "application/x-ndjson")
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
DOCUMENT = openapi_document(ENDPOINTS, "1")

CASES = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    for mode in ([POSITIVE, NEGATIVE] if "requestBody" in operation else [POSITIVE])
    if (path, mode) != ("/v1/messages/count_tokens", NEGATIVE)  # its fields are those of /v1/messages
]


def errors_of_events(stream):
    """Return the errors of a stream's complete events."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n")[:-1] if line[-1:] == "}"]
    responses = [event for event in (event.get("response") for event in events) if isinstance(event, dict)]
    return [event["error"] for event in events + responses if event.get("error")]


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_request_breaks_the_server(schema, path, method, mode):
    operation = schema[path][method.upper()]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(**SETTINGS)
    def every_answer_is_as_documented(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "fake"
        response = case.call()
        assert response.status_code < 500, response.text
        if response.headers["content-type"][0].startswith(STREAMS):  # schemathesis may cut it short
            assert not errors_of_events(response.text)
            return
        case.validate_response(response, checks=CHECKS)

    every_answer_is_as_documented()


def test_document_names_every_struct_once():
    schemas = DOCUMENT["components"]["schemas"]
    for name in (
        "CompletionRequest",
        "ChatCompletionRequest",
        "ChatCompletion",
        "ChatCompletionChunk",
        "Completion",
        "ErrorResponse",
    ):
        assert name in schemas
    references = {part.split('"')[0] for part in json.dumps(DOCUMENT).split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert schemas["CompletionRequest"]["additionalProperties"] is False


def test_document_has_the_limits_of_the_engine():
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        number, _ = DOCUMENT["components"]["schemas"][name]["properties"]["n"]["anyOf"]
        assert number == {"type": "integer", "minimum": 1, "maximum": 128}


def test_document_lists_every_route_and_status():
    assert set(DOCUMENT["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/v1/requests",
        "/v1/embeddings", "/v1/classify", "/classify", "/v1/score", "/score",
        "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/embed", "/predict",
        "/v1/requests/{request_id}", "/v1/kv_transfers/{transfer_id}", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items",
        "/health", "/ready", "/ping", "/live", "/metrics", "/stats", "/engine", "/version",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
        "/v1/completions/render", "/v1/chat/completions/render", "/inference/v1/generate", "/get_world_size",
        "/tokenize", "/detokenize", "/tokenizer_info", "/reset_prefix_cache",
        "/api/chat", "/api/generate", "/api/show", "/api/tags", "/api/ps", "/api/version",
        "/api/embed", "/api/embeddings",
        "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping",
    }  # fmt: skip
    generation = DOCUMENT["paths"]["/v1/completions"]["post"]
    statuses = {"200", "400", "401", "404", "413", "415", "429", "499", "500", "503", "504"}
    assert set(generation["responses"]) == statuses
    assert set(generation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "422" not in json.dumps(DOCUMENT["paths"])
    assert "security" in generation
    assert "security" not in DOCUMENT["paths"]["/health"]["get"]


async def test_docs_page_needs_no_other_server(http):
    page = await http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    anchors = set(re.findall(r' id="([^"]+)"', page.text))
    links = set(re.findall(r'(?:href|src)="([^"]+)"', page.text))
    assert links == {"openapi.json"} | {f"#{anchor}" for anchor in anchors} & links
    assert "#CompletionRequest" in links


async def test_docs_page_lists_every_field(http):
    page = (await http.get("/docs")).text
    for path in DOCUMENT["paths"]:
        assert f" {path}</h3>" in page
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert f'<h3 id="{name}">' in page
        for field in schema.get("properties", {}):
            assert f"<td><code>{field}</code>" in page


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 128}, "integer, at least 1, at most 128"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, "number, above 0"),
        ({"enum": ["a", "b"], "type": "string"}, "'a', 'b'"),
        ({"const": False, "type": "boolean"}, "False"),
        ({"type": "null"}, "not supported"),
        ({"$ref": "#/components/schemas/Health"}, "Health"),
        (
            {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]},
            "string or list of (string), at most 16 items",
        ),
    ],
)
def test_limits_in_words(schema, words):
    assert limits_in_words(schema) == words
