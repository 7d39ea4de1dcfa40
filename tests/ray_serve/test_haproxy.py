"""Ray Serve with HAProxy in front: all APIs stream through it, and what they say stays the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from quire.server.http.listening import bound_socket

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")

import ray
from ray import serve

from quire.ray import build_app

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PREFIX = "/models"
LENGTH = 40  # tokens
TEXT = "Tell me a long story about a fox. " * 700  # more than a buffer of HAProxy's
MESSAGES = [{"role": "user", "content": TEXT[:200]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT[:200], "max_tokens": LENGTH},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/responses": {"input": TEXT[:200], "max_output_tokens": LENGTH},
}


def free_port() -> int:
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """The application at HAProxy, and at the ingress itself."""
    port, own_port = free_port(), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        for name in ("METRICS", "STATS"):
            patch.setenv(f"RAY_SERVE_HAPROXY_{name}_PORT", str(free_port()))
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"port": port})
        app = build_app(
            model="mini", cache_size=0.05, replica_cpus=1, standby_engine=False, ingress_port=own_port
        )
        serve.run(app, route_prefix=PREFIX)
        yield f"http://127.0.0.1:{port}{PREFIX}", f"http://{ray.util.get_node_ip_address()}:{own_port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def streamed(url: str, path: str) -> str:
    """The text of a stream."""
    body = {"model": "mini", "temperature": 0, "stream": True, **BODIES[path]}
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(_text(json.loads(line)) for line in lines)


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the text."""
    if "choices" in event:
        event = event["choices"][0]
    delta = event.get("text") or event.get("delta") or ""
    return delta if isinstance(delta, str) else delta.get("text") or delta.get("content") or ""


def test_haproxy_is_in_front(urls: tuple[str, str]) -> None:
    children = psutil.Process().children(recursive=True)
    assert any(child.name() == "haproxy" for child in children)
    health = httpx.get(urls[0].removesuffix(PREFIX) + "/-/healthz")
    assert health.status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_streams_are_those_of_the_ingress(urls: tuple[str, str], path: str) -> None:
    through, direct = (streamed(url, path) for url in urls)
    assert through == direct != ""


def test_events_come_one_by_one(urls: tuple[str, str]) -> None:
    proxy, ingress = urls
    body = {"model": "mini", "prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{proxy}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # its end would close the connection
        next(lines)
        assert 'role="both"} 1.0' in in_flight(ingress)


def in_flight(ingress: str) -> str:
    """The metric of the requests at the engine."""
    lines = httpx.get(f"{ingress}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("quire_route_engine_in_flight{")]
    return line


def test_errors_and_long_bodies_pass(urls: tuple[str, str]) -> None:
    proxy, _ = urls
    answer = httpx.post(f"{proxy}/v1/completions", json={"model": "mini", "prompt": TEXT}, timeout=60)
    assert answer.status_code == 400
    assert "max_model_len" in answer.json()["error"]["message"]
    assert httpx.get(f"{proxy}/v1/models").json()["data"][0]["id"] == "mini"
    assert httpx.get(f"{proxy}/no/such/path").status_code == 404
