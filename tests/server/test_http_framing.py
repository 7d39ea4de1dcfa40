"""Where a request ends: what is refused because it could end in two places, and that nothing else is."""

import contextlib
import itertools

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import served
from starlette.requests import Request
from starlette.responses import Response

from quire.config import ServerConfig
from quire.server.app import create_app
from raw_http import COMPLETION, RawConnection, chunked, completion_head, request

CHUNKED = "Transfer-Encoding: chunked"
MAX_HEADER_BYTES = 2000


@pytest.fixture
def connect(live):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(RawConnection(live))).connect()


@pytest.fixture(scope="module")
def echo():
    """A server whose answer is the body; yields its URL."""

    async def app(scope, receive, send):
        body = await Request(scope, receive).body()
        await Response(body)(scope, receive, send)

    with served(app) as url:
        yield url


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", CHUNKED),
        (CHUNKED, "Content-Length: 5"),
        ("Transfer-Encoding: xchunked", "Content-Length: 5"),
        ("Content-Length: 5", "Transfer-Encoding: identity"),
        ("transfer-encoding:chunked", "CONTENT-LENGTH:5"),
        ("Transfer-Encoding : chunked", "Content-Length: 5"),
        ("Transfer-Encoding:\x0bchunked", "Content-Length: 5"),
        ("Transfer-Encoding:\r\n chunked", "Content-Length: 5"),
        (" Transfer-Encoding: chunked", "Content-Length: 5"),
        ("X: a\nTransfer-Encoding: chunked", "Content-Length: 5"),
        ("X: a\rTransfer-Encoding: chunked", "Content-Length: 5"),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: ,chunked",),
        ('Transfer-Encoding: "chunked"',),
        ("Transfer-Encoding: chunked\x00",),
        (CHUNKED, CHUNKED),
        (CHUNKED, "Transfer-Encoding: identity"),
        ("Content-Length: 5", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5, 5",),
        ("Content-Length: +5",),
        ("Content-Length: -5",),
        ("Content-Length: 0x5",),
        ("Content-Length: 5 5",),
        ("Content-Length:",),
        ("Content-Length: 99999999999999999999",),
    ],
)
def test_a_doubtful_end_is_refused_and_nothing_after_it_is_read(connect, llm, headers):
    connection = connect()
    connection.send(completion_head(*headers) + b"0\r\n\r\n" + request())
    assert connection.answer().status in (400, 501)
    assert connection.is_closed()
    assert not llm.seen


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / RTSP/1.0\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\x00",
    ],
)
def test_what_is_not_http_is_refused_at_once(connect, head):
    connection = connect()
    connection.send(head)
    assert connection.answer().status in (400, 501)
    assert connection.is_closed()


def test_a_header_beyond_the_limit_is_refused_however_it_comes(llm):
    app = create_app(llm, ServerConfig())
    exact = request("/live", "X: ")
    exact = exact.replace(b"X: ", b"X: " + b"a" * (MAX_HEADER_BYTES - len(exact)))
    with served(app, max_header_bytes=MAX_HEADER_BYTES, max_headers=5) as url:
        for pieces, status in [
            ([exact], 200),
            ([exact.replace(b"X: a", b"X: aa")], 431),
            ([exact[:-4], *([b"a" * 10] * 1000)], 431),
            ([b"GET /" + b"a" * 2 * MAX_HEADER_BYTES], 431),
            ([request("/live", *["X: a"] * 4)], 200),
            ([request("/live", *["X: a"] * 5)], 431),
        ]:
            with contextlib.closing(RawConnection(url).connect()) as connection:
                connection.send(*pieces)
                answer = connection.answer()
                assert answer.status == status
                if status == 431:
                    assert answer.error["code"] == "header_too_large"
                    assert connection.is_closed()


@pytest.mark.parametrize(
    "tail",
    [
        [b"5;" + b"x" * 60_000],
        [b"5;", *([b"x" * 100] * 600)],
        [b"0\r\nTrailer: " + b"x" * 60_000],
        [b"0\r\n", *([b"T: x\r\n" * 20] * 500)],
    ],
)
def test_chunks_without_data_are_limited(connect, llm, tail):
    connection = connect()
    connection.send(completion_head(CHUNKED), b"1\r\n \r\n", *tail)
    answer = connection.answer()
    assert answer.status == 400
    assert "no data" in answer.error["message"]
    assert not llm.seen


def test_trailers_are_dropped(connect, llm):
    connection = connect()
    body = chunked(COMPLETION, 7).replace(b"\r\n0\r\n\r\n", b"\r\n0\r\nX-Request-Id: trailer\r\n\r\n")
    connection.send(completion_head(CHUNKED, "X-Request-Id: header") + body)
    assert connection.answer().status == 200
    assert "header" in llm.seen[0].request_id


def test_an_upgrade_is_declined_and_the_body_is_read(connect, llm):
    connection = connect()
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    head = completion_head(*upgrade, f"Content-Length: {len(COMPLETION)}")
    connection.send(head + COMPLETION + request())
    assert [connection.answer().status for _ in range(2)] == [200, 200]
    assert llm.seen[0].prompt == "Hi"


def test_a_client_that_waits_to_be_told_to_send_its_body(connect):
    connection = connect()
    connection.send(completion_head("Expect: 100-continue", f"Content-Length: {len(COMPLETION)}"))
    assert connection.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    assert connection.reader.readline() == b"\r\n"
    connection.send(COMPLETION)
    assert connection.answer().status == 200


@pytest.mark.parametrize("size", [10, 60_000, 70_000, 300_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_of_all_sizes(echo, size, is_chunked):
    body = bytes(index % 251 for index in range(size))
    head = b"POST / HTTP/1.1\r\nHost: a\r\n"
    if is_chunked:
        sent = head + CHUNKED.encode() + b"\r\n\r\n" + chunked(body, 7_000)
    else:
        sent = head + b"Content-Length: %d\r\n\r\n" % size + body
    with contextlib.closing(RawConnection(echo).connect()) as connection:
        connection.send(sent[: len(sent) // 2], sent[len(sent) // 2 :])
        assert connection.answer() == (200, body)


def test_a_body_of_one_byte_chunks(connect, llm):
    connection = connect()
    connection.send(completion_head(CHUNKED) + chunked(COMPLETION + b" " * 30_000, 1) + request())
    assert [connection.answer().status for _ in range(2)] == [200, 200]
    assert llm.seen[0].prompt == "Hi"


def test_after_a_body_that_is_too_large_the_next_request_is_read(connect):
    connection = connect()
    size = 2_000_000
    connection.send(completion_head(f"Content-Length: {size}"))
    assert connection.answer().status == 413
    connection.send(b" " * size, request())
    assert connection.answer().status == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_writes_before_it_reads_gets_its_refusal_and_goes_on(connect, is_chunked):
    connection = connect()
    body = b"a" * 20_000_000
    head = request("/nope", CHUNKED if is_chunked else f"Content-Length: {len(body)}", method="POST")
    connection.send(head, chunked(body, 65_536) if is_chunked else body, request())
    assert [connection.answer().status for _ in range(2)] == [404, 200]


@pytest.mark.parametrize("size", [0, 1, 20_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_connection_that_is_to_close_is_read_to_the_end_of_the_body(connect, is_chunked, size):
    connection = connect()
    body = b"a" * size
    framing = CHUNKED if is_chunked else f"Content-Length: {size}"
    head = request("/nope", "Connection: close", framing, method="POST")
    connection.socket.sendall(head)
    connection.socket.sendall(chunked(body, 65_536) if is_chunked else body)  # which fails if it is not read
    connection.send(request())
    assert connection.answer().status == 404
    assert connection.is_closed()


@given(
    bodies=st.lists(st.tuples(st.text("\r\n0;a", max_size=40), st.integers(0, 5)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 400)),
)
def test_bodies_are_divided_as_they_were_sent(echo, bodies, cuts):
    sent = b""
    for text, size in bodies:  # in chunks of this size; 0: with its length
        body = text.encode()
        sent += b"POST / HTTP/1.1\r\nHost: a\r\n"
        if size:
            sent += b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, size)
        else:
            sent += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    ends = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    with contextlib.closing(RawConnection(echo).connect()) as connection:
        connection.send(*(sent[a:b] for a, b in itertools.pairwise(ends)))
        for text, _ in bodies:
            assert connection.answer() == (200, text.encode())


def test_a_client_that_leaves_within_a_chunked_body(connect, live, llm):
    connect().send(completion_head(CHUNKED) + b"5\r\n{")
    assert httpx.get(f"{live}/health").status_code == 200
    assert not llm.seen
