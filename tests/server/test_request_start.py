"""X-Request-Start: what it may say, and what becomes of it."""

from __future__ import annotations

import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.client_request import ClientRequest
from quire.config import ServerConfig
from quire.errors import InvalidRequestError
from quire.server.app import create_app
from quire.server.calls.request_start import MAX_HELD, arrival_time_of, request_start


def age_of(value: str) -> float:
    return time.monotonic() - arrival_time_of(value)


@pytest.mark.parametrize("unit", [1, 1_000, 1_000_000])
@pytest.mark.parametrize("prefix", ["", "t="])
def test_seconds_milliseconds_and_microseconds_are_told_apart(prefix: str, unit: int):
    for age in (0, 5, 500):
        assert age_of(f"{prefix}{int((time.time() - age) * unit)}") == pytest.approx(age, abs=1.5)


def test_the_time_is_neither_to_come_nor_long_ago():
    assert age_of(request_start(time.time() + 3600)) == pytest.approx(0, abs=1)
    assert age_of("t=0") == pytest.approx(MAX_HELD, abs=1)
    assert age_of(request_start(time.time() - 12)) == pytest.approx(12, abs=1)


@pytest.mark.parametrize("value", ["", "t=", "t=-1", "now", "1e9", "nan", "inf", "1.2.3", "\u0661", "9" * 50])
def test_what_is_no_time_is_refused(value: str):
    with pytest.raises(InvalidRequestError, match=r"X-Request-Start is .*must be a time since the epoch"):
        arrival_time_of(value)


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_whatever_comes_the_time_is_bounded(value: str):
    try:
        age = age_of(value)
    except InvalidRequestError:
        return
    assert -1 <= age <= MAX_HELD + 1


def test_a_router_replaces_what_a_client_says():
    scope = {"headers": [(b"x-request-start", b"t=1"), (b"accept", b"*/*")], "state": {"request_id": "a"}}
    request = ClientRequest(scope, None, b"")
    headers = request.headers()
    assert headers.getall("X-Request-Start") == [request_start(request.start)]
    assert age_of(headers["X-Request-Start"]) == pytest.approx(0, abs=1)


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "fake", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_server_reads_it_only_where_it_is_told_to(llm, trusts: bool, path: str, body: dict):
    app = create_app(llm, ServerConfig(trust_request_start=trusts))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for start, status in ((request_start(time.time() - 7), 200), ("nonsense", 400 if trusts else 200)):
            answer = await client.post(path, json=body, headers={"X-Request-Start": start})
            assert answer.status_code == status, answer.text
    at = llm.seen[0].options.get("arrival_time")
    assert (at == pytest.approx(time.monotonic() - 7, abs=2)) if trusts else at is None
