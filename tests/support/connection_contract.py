"""What every HTTP server does about clients that are slow, many, or do not read, over real sockets."""

import contextlib
import itertools
import logging
import os
import resource
import threading

import pytest

from call_through import call_through
from quire.server.http import acceptor
from raw_http import COMPLETION, RawConnection, completion_head, request

SHORT = 0.05  # seconds
HEAD_OF_COMPLETION = completion_head(f"Content-Length: {len(COMPLETION)}")


class Served:
    """A server for a test of the contract, with `/live`; inherit it.

    Attributes:
        url: of the server.
        held: a request that the server does not answer until its client leaves.
        endless: a request that the server answers without end.
    """

    url: str
    held: bytes
    endless: bytes

    def wait_for_held(self):
        """Return once the held request is being served."""
        raise NotImplementedError

    def wait_for_end(self):
        """Return once the endless answer has ended; return how many bytes of it were sent."""
        raise NotImplementedError

    def served_calls(self):
        """Return the completions that were begun."""
        raise NotImplementedError


class ConnectionContract:
    """Tests of one kind of server; inherit it, with a fixture `serve`.

    `serve(**limits)` starts a server with these limits of connections, and returns a `Served`.
    """

    @pytest.fixture
    def serving(self, serve):
        """Return a function that starts a server with limits; returns it and what makes connections to it."""
        with contextlib.ExitStack() as stack:

            def start(**limits):
                server = serve(**limits)

                def new(**options):
                    return stack.enter_context(contextlib.closing(RawConnection(server.url, **options)))

                return server, new

            yield start

    @pytest.fixture
    def accepting(self, monkeypatch):
        """An event: as long as it is cleared, no time of connections passes, and what clients send waits."""
        is_accepting = threading.Event()

        def accept_when_it_is_set(accept, self):
            is_accepting.wait(60)
            accept(self)

        call_through(monkeypatch, acceptor.Acceptor, "_accept", accept_when_it_is_set)
        is_accepting.set()
        yield is_accepting
        is_accepting.set()

    @pytest.mark.parametrize(
        "sent", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r", request() + b"\r\nGET"]
    )
    def test_a_header_that_is_not_completed(self, serving, accepting, sent):
        _, new = serving(header_timeout=SHORT)
        accepting.clear()
        connection = new().connect()
        connection.send(sent)
        accepting.set()
        if sent.startswith(request()):
            assert connection.answer().status == 200
        answer = connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert "header_timeout" in answer.error["message"]
        assert connection.is_closed()

    def test_connections_that_send_nothing_are_closed_without_an_answer(self, serving):
        _, new = serving(header_timeout=SHORT)
        for connection in [new().connect() for _ in range(20)]:
            assert connection.is_closed()

    @pytest.mark.parametrize("limit", ["body_timeout", "body_idle_timeout"])
    @pytest.mark.parametrize(
        "sent", [HEAD_OF_COMPLETION + b"{", completion_head("Transfer-Encoding: chunked")]
    )
    def test_a_body_that_is_not_completed(self, serving, limit, sent):
        server, new = serving(**{limit: SHORT})
        connection = new().connect()
        connection.send(sent)
        answer = connection.answer()
        assert answer.status == 408
        assert limit in answer.error["message"]
        assert connection.is_closed()
        assert not server.served_calls()

    def test_an_idle_connection_is_closed_and_one_whose_request_runs_is_not(self, serving, accepting):
        server, new = serving(keep_alive_timeout=SHORT, header_timeout=SHORT, body_timeout=SHORT)
        accepting.clear()
        held, idle = new().connect(), new().connect()
        held.send(server.held)
        idle.send(request())
        accepting.set()
        server.wait_for_held()
        assert idle.answer().status == 200
        assert idle.is_closed()
        held.socket.settimeout(2 * SHORT)
        with pytest.raises(TimeoutError):
            held.reader.readline()

    def test_a_client_that_does_not_read_is_disconnected_and_its_request_ended(self, serving):
        server, new = serving(write_timeout=SHORT)
        connection = new(receive_buffer=4096).connect()
        connection.send(server.endless)
        assert server.wait_for_end() < 20_000_000  # the system's buffers, for the most part

    def test_when_there_is_no_room_the_connection_that_waited_longest_is_closed(self, serving):
        server, new = serving(max_connections=4)
        held = new().connect()
        held.send(server.held)
        server.wait_for_held()
        waiting = [new().connect() for _ in range(3)]
        for connection in waiting:
            connection.send(request())
            assert connection.answer().status == 200
        waiting[1].send(HEAD_OF_COMPLETION)  # begins a request: now the others have waited longer
        waiting[2].send(request())
        assert waiting[2].answer().status == 200
        assert answer_to_new(new).status == 200
        assert waiting[0].is_closed()
        waiting[1].send(COMPLETION)
        assert waiting[1].answer().status == 200

    def test_when_all_connections_are_busy_others_are_refused_until_one_is_not(self, serving, caplog):
        server, new = serving(max_connections=1)
        held = new().connect()
        held.send(server.held)
        server.wait_for_held()
        with caplog.at_level(logging.WARNING):
            for _ in range(10):
                answer = answer_to_new(new)
                assert answer.status == 503
                assert "max_connections" in answer.error["message"]
        assert len(caplog.records) == 1
        held.close()
        while (answer := answer_to_new(new)).status == 503:
            pass
        assert answer.status == 200

    @pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", HEAD_OF_COMPLETION + b"{"])
    def test_slow_clients_take_no_place_from_others(self, serving, sent):
        _, new = serving(max_connections=8)
        for _ in range(40):
            new().connect().send(sent)
        for _ in range(10):
            assert answer_to_new(new).status == 200

    def test_without_descriptors_accepting_pauses_with_one_line_in_the_log(
        self, serving, caplog, monkeypatch
    ):
        monkeypatch.setattr(acceptor, "RETRY_INTERVAL", 0.01)
        attempts, several = itertools.count(1), threading.Event()

        def counted(pause, self, error):
            pause(self, error)
            if next(attempts) == 5:
                several.set()

        call_through(monkeypatch, acceptor.Acceptor, "_pause", counted)
        _, new = serving()
        connection = new()
        with caplog.at_level(logging.WARNING), no_descriptors():
            connection.connect()
            connection.send(request())
            assert several.wait(60)
            assert len(caplog.records) == 1
            assert "Too many open files" in caplog.text
        assert connection.answer().status == 200


def answer_to_new(new):
    """Return the answer to a request on a connection of its own."""
    connection = new().connect()
    connection.send(request())
    return connection.answer()


@contextlib.contextmanager
def no_descriptors():
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        yield
