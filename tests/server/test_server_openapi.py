"""The OpenAPI document, and schemathesis against the server it describes."""

import json
import subprocess
import sys

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

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.openapi import ENDPOINTS, openapi_document

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def schema():
    with served(create_app(FakeLLM(), ServerConfig())) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


SETTINGS = {
    "max_examples": 60,
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate],  # shrinking a case of this schema takes minutes
    "suppress_health_check": list(HealthCheck),
}
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(endpoint, POSITIVE) for endpoint in ENDPOINTS]
CASES += [(endpoint, NEGATIVE) for endpoint in ENDPOINTS if endpoint.body]


@pytest.mark.parametrize(("endpoint", "mode"), CASES)
def test_no_request_breaks_the_server(schema, endpoint, mode):
    operation = schema[endpoint.path][endpoint.method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(**SETTINGS)
    def every_answer_is_as_documented(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "fake"
        response = case.call()
        assert response.status_code < 500, response.text
        if response.headers["content-type"][0].startswith(
            "text/event-stream"
        ):  # schemathesis may cut it short
            assert '"error":' not in response.text
            return
        case.validate_response(response, checks=CHECKS)

    every_answer_is_as_documented()


def test_document_names_every_struct_once():
    document = openapi_document("1")
    text = json.dumps(document)
    for name in (
        "CompletionRequest",
        "ChatCompletionRequest",
        "ChatCompletion",
        "Completion",
        "ErrorResponse",
    ):
        assert name in document["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


def test_the_front_does_not_import_torch():
    code = "import quire.server.app, quire.server.http_server, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
