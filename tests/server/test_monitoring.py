"""The monitoring port: answers while the event loop is blocked, and no client takes it from others."""

import asyncio
import contextlib
import socket

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import EngineDeadError
from quire.scheduling.outputs import SchedulerStats
from quire.server.app import create_app
from quire.server.http.listening import bound_socket, url_of
from quire.server.monitoring import port as monitoring
from quire.server.monitoring.engine_probes import health_of, latest_exposition, stats_kept_current
from quire.server.monitoring.port import Answer, monitored
from quire.server.monitoring.probes import METRICS_AGE, STUCK_AFTER, MonitoredServer


def fail():
    raise RuntimeError("on purpose")


ANSWERS = {"/a": lambda: Answer(200, "text/plain", b"yes"), "/fails": fail}


@contextlib.contextmanager
def answering(answers=ANSWERS):
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound, monitored(bound, answers):
        yield bound.getsockname()[1]


@pytest.fixture
def port():
    with answering() as port:
        yield port


def raw_answer(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/a", 200, "yes"),
        ("GET", "/a?x=1", 200, "yes"),
        ("HEAD", "/a", 200, ""),
        ("POST", "/a", 405, "Method Not Allowed: use GET\n"),
        ("GET", "/b", 404, "Not Found: this port has /a, /fails\n"),
        ("GET", "/fails", 500, "Internal Server Error: see the server's log\n"),
    ],
)
def test_each_connection_gets_one_answer(port, method, path, status, text):
    answer = httpx.request(method, f"http://127.0.0.1:{port}{path}")
    assert (answer.status_code, answer.text) == (status, text)
    assert answer.headers["connection"] == "close"


def test_a_head_that_comes_in_pieces_is_answered(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for byte in b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert b"".join(iter(lambda: connection.recv(65536), b"")).endswith(b"\r\n\r\nyes")


def test_a_head_without_end_is_refused(port):
    request = b"GET /a HTTP/1.1\r\nX: " + b"a" * (monitoring.MAX_HEAD_BYTES - 10)
    assert raw_answer(port, request).startswith(b"HTTP/1.1 431 ")


def test_garbage_is_answered_and_harms_nobody(port):
    assert raw_answer(port, b"\xff\x00 \r\n\r\n").startswith(b"HTTP/1.1 404 ")
    assert httpx.get(f"http://127.0.0.1:{port}/a").text == "yes"


def test_silent_connections_give_way_to_new_ones(port, monkeypatch):
    monkeypatch.setattr(monitoring, "CONNECTION_TIMEOUT", 1000)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(monitoring.MAX_CONNECTIONS + 2)
        ]
        assert httpx.get(f"http://127.0.0.1:{port}/a").text == "yes"
        for connection in silent[:3]:  # two for the others, one for the question
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        silent[3].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[3].recv(1)


def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(monitoring, "CONNECTION_TIMEOUT", 0.0)
    with answering() as port:
        assert raw_answer(port, b"") == b""


@pytest.fixture
def context(llm):
    return create_app(llm, ServerConfig()).state.context


def server_of(context, **options):
    return MonitoredServer(lambda: health_of([context]), lambda: latest_exposition([context]), **options)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


async def test_it_answers_while_the_event_loop_is_blocked(context):
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        async with stats_kept_current([context]), server_of(context).answering(bound):
            url = url_of("127.0.0.1", bound)  # the calls that follow block this event loop
            assert httpx.get(f"{url}/health").json()["status"] == "ok"
            assert httpx.get(f"{url}/live").json()["status"] == "ok"
            assert "quire_requests_running" in httpx.get(f"{url}/metrics").text


async def test_it_tells_of_a_dead_engine_and_of_draining(context, llm):
    server = server_of(context)
    llm.dead = EngineDeadError("gone")
    assert server.health().status == 503
    assert b"gone" in server.health().body
    assert server.live().status == 200
    assert b"quire_engine_up 0.0" in server.metrics().body
    llm.dead = None
    context.calls.begin_drain()
    assert b"draining" in server.health().body


async def test_an_event_loop_that_does_not_turn_is_neither_alive_nor_ready(context):
    clock = Clock()
    server = server_of(context, read_clock=clock)
    clock.now += STUCK_AFTER
    assert (server.live().status, server.health().status) == (200, 200)
    clock.now += 1
    for answer in (server.live(), server.health()):
        assert answer.status == 503
        assert b"has not turned for 11 s" in answer.body
    assert server.metrics().status == 200
    server.note_turn()
    assert (server.live().status, server.health().status) == (200, 200)


async def test_the_event_loop_notes_that_it_turns(context):
    clock = Clock()
    server = server_of(context, read_clock=clock)
    clock.now += STUCK_AFTER + 1
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        async with server.answering(bound):
            await asyncio.sleep(0)
            assert server.live().status == 200


async def test_metrics_are_rendered_again_after_a_while_only(context, llm, monkeypatch):
    clock = Clock()
    server = server_of(context, read_clock=clock)
    first = server.metrics().body
    monkeypatch.setattr(type(llm), "latest_stats", SchedulerStats(num_running=7))
    assert server.metrics().body == first
    clock.now += 2 * METRICS_AGE
    assert b"quire_requests_running 7.0" in server.metrics().body
