"""The access log: one line for each request, whatever becomes of it and whatever it contains."""

import contextlib
import json
import re
import socket

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import served

from logged import logged
from quire.config import EdgeConfig, ServerConfig
from quire.server.app import create_app
from quire.server.wire.access_log import MAX_LINE_LENGTH, AccessLogging, AccessRecord, printable

BODY = {"model": "fake", "prompt": "Hi", "max_tokens": 3}
TEXT_LINE = re.compile(
    rb'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \S+ "[^\s"]+ [^\s"]+" \d{3}( [a-z_]+=[!-~]+)+\n'
)


@pytest.fixture
async def logging_server(llm, monkeypatch):
    """Return a client of a server with a key, and its log."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(line_format="json", **edge):
            lines = stack.enter_context(logged(monkeypatch, line_format))
            app = create_app(llm, ServerConfig(api_key="secret", edge=EdgeConfig(**edge)), log=lines.log)
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
            http.headers["x-api-key"] = "secret"
            return await stack.enter_async_context(http), lines

        yield start


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_what_the_answer_told(logging_server, stream):
    http, lines = await logging_server()
    body = {**BODY, "prompt": ["a prompt", "another"], "n": 2, "stream": stream, "stop": "q", "seed": 1}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await http.post("/v1/completions?a=b", json=body | options, headers={"X-Request-Id": "mine"})
    events = answer.text.replace("data: ", "").split("\n\n") if stream else [answer.text]
    usage = json.loads(events[-3] if stream else events[0])["usage"]
    [entry] = lines.entries
    shown = (entry["method"], entry["path"], entry["status"], entry["request_id"], entry["client"])
    assert shown == ("POST", "/v1/completions", 200, "mine", "127.0.0.1")
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert entry["completion_tokens"] == usage["completion_tokens"]
    assert entry["finish_reasons"] == {"length": 2, "stop": 2}
    assert 0 < entry["time_to_first_token"] <= entry["latency"]
    assert "error" not in entry


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "error"),
    [
        ("/v1/completions", BODY, {"x-api-key": "wrong-key"}, 401, "invalid_api_key"),
        ("/v1/completions", BODY, {"Host": "evil.example"}, 421, "host_not_allowed"),
        ("/v1/completions", BODY, {"Origin": "//a", "Content-Type": "a/b"}, 403, "cross_site_request"),
        ("/v1/completions", BODY, {"X-Request-Id": "a b"}, 400, "invalid_request_id"),
        ("/v1/completions", {**BODY, "top_p": 7}, {}, 400, "invalid_request_error:top_p"),
        ("/v1/completions", {**BODY, "prompt": ["PRIVATE"]*2000}, {}, 400, "invalid_request_error:prompt"),
        ("/v1/completions", {**BODY, "model": "b"}, {}, 404, "model_not_found:model"),
        ("/v1/completions", {**BODY, "prompt": "queue"}, {}, 429, "queue_full"),
        ("/v1/completions", {**BODY, "prompt": "crash"}, {}, 500, "internal_error"),
        ("/v1/completions", {**BODY, "prompt": "fail", "stream": True}, {}, 200, "generation_failed"),
        ("/v1/nothing", BODY, {}, 404, "route_not_found"),
        ("/v1/models", BODY, {}, 405, "method_not_allowed"),
    ],
)  # fmt: skip
async def test_what_fails_has_a_line_that_says_why(logging_server, path, body, headers, status, error):
    http, lines = await logging_server()
    await http.post(path, json=body, headers=headers)
    [entry] = lines.entries
    assert (entry["path"], entry["status"], entry["error"]) == (path, status, error)
    assert not re.search(rb"secret|wrong-key|PRIVATE", lines.lines[0])


async def test_what_is_polled_is_logged_if_it_fails(logging_server, llm):
    http, lines = await logging_server()
    for path in ("/health", "/live", "/metrics", "/stats", "/v1/requests", "/health"):
        await http.get(path)
        llm.dead = "killed" if path == "/v1/requests" else None
    assert [(entry["path"], entry["status"]) for entry in lines.entries] == [("/health", 503)]


def test_clients_that_leave_have_a_line(llm, monkeypatch):
    with logged(monkeypatch) as lines:
        with served(create_app(llm, ServerConfig(), log=lines.log)) as url:
            body = {**BODY, "prompt": "hold", "max_tokens": 20, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
            assert llm.abort_seen.wait(60)
        [entry] = lines.entries
    assert (entry["status"], entry["error"], entry["client"]) == (200, "client_left", "127.0.0.1")
    assert entry["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("sent", "path", "status", "error"),
    [
        (b"nonsense\r\n\r\n", "-", 400, "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Content-Length: 9\r\n\r\n{", "/v1/completions", 408, "request_timeout"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Content-Length: 70000\r\n\r\n{", "/v1/completions", 499, "request_timeout"),
    ],
)  # fmt: skip
def test_what_the_connection_refuses_has_a_line(llm, monkeypatch, sent, path, status, error):
    with logged(monkeypatch) as lines:
        app = create_app(llm, ServerConfig(), log=lines.log)
        with served(app, log=lines.log, body_idle_timeout=0.01) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
                while connection.recv(1 << 16):
                    pass
        [entry] = lines.entries
    assert (entry["path"], entry["status"], entry["error"]) == (path, status, error)
    assert entry["client"] == "127.0.0.1"


async def test_a_request_cannot_forge_a_line(monkeypatch):
    async def app(scope, receive, send):
        scope["state"]["request_id"] = HOSTILE
        raise RuntimeError

    for line_format in ("text", "json"):
        with logged(monkeypatch, line_format) as lines:
            scope = {
                "type": "http", "method": HOSTILE, "raw_path": HOSTILE.encode(), "path": "/",
                "client": (HOSTILE, 1),
            }  # fmt: skip
            with pytest.raises(RuntimeError):
                await AccessLogging(app, log=lines.log)(scope, None, None)
            [line] = lines.lines
            assert len(line) <= MAX_LINE_LENGTH
            assert max(line[:-1]) <= 0x7E
            assert min(line[:-1]) >= 0x20
            if line_format == "text":
                assert TEXT_LINE.fullmatch(line)
                assert b" 500 " in line
                assert b" status=" not in line
            else:
                assert json.loads(line)["status"] == 500


HOSTILE = '/a\n2026 "GET / 200 status=1\r\x00\x1b[2J\x85\u2028\U0001f600\\" ' * 99


@given(st.text(max_size=40), st.integers(3, 30))
def test_printable_text_has_one_field_and_its_length(text, max_length):
    shown = printable(text, max_length)
    assert len(shown) <= max_length
    assert re.fullmatch(r"[!#-~]*", shown)
    if re.fullmatch(r"[!#-\[\]-~]*", text) and len(text) <= max_length:
        assert shown == text


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_the_longest_line(monkeypatch, line_format):
    with logged(monkeypatch, line_format) as lines:
        record = AccessRecord(client=HOSTILE, method=HOSTILE, path=HOSTILE, request_id=HOSTILE)
        record.tenant = record.error = HOSTILE
        lines.log.write(record)
        assert 512 < len(lines.lines[0]) <= MAX_LINE_LENGTH


async def test_text(logging_server):
    http, lines = await logging_server("text")
    await http.post("/v1/completions", json={**BODY, "n": 2}, headers={"X-Request-Id": "mine"})
    await http.get("/v1/models/other")
    generated, failed = lines.lines
    assert TEXT_LINE.fullmatch(generated)
    assert TEXT_LINE.fullmatch(failed)
    assert b' 127.0.0.1 "POST /v1/completions" 200 request_id=mine latency=' in generated
    assert b"prompt_tokens=3 cached_tokens=3 completion_tokens=6 " in generated
    assert generated.endswith(b"finish_reasons=length:2\n")
    assert b"error=model_not_found:model" in failed


async def test_the_tenant_is_that_of_the_key(llm, monkeypatch, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[tenants.blue]\nkeys = ["blue-key-of-16-characters"]\n')
    path.chmod(0o600)
    with logged(monkeypatch) as lines:
        app = create_app(llm, ServerConfig(api_keys_file=str(path)), log=lines.log)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for key in ("blue-key-of-16-characters", "other"):
                await http.post("/v1/completions", json=BODY, headers={"x-api-key": key})
        known, unknown = lines.entries
    assert (known["status"], known["tenant"]) == (200, "blue")
    assert (unknown["status"], "tenant" in unknown) == (401, False)
