from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from quire.datadist.wire import handshake, sockets
from quire.datadist.wire.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    ConnectionKind,
    Greeting,
    HandshakeError,
    connecting_proof,
    connection_key,
    decode_greeting,
    greet,
    is_proof,
    listening_proof,
    new_greeting,
)


def soon() -> float:
    return time.monotonic() + 20


@contextlib.contextmanager
def listening(answer):
    """A socket whose other end runs `answer` in a thread; what that raises or returns is the list."""
    mine, theirs = socket.socketpair()
    results = []

    def run():
        try:
            results.append(answer(theirs))
        except Exception as error:
            results.append(error)
        finally:
            theirs.close()

    for end in (mine, theirs):
        end.setblocking(False)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield mine, results
    finally:
        mine.close()
        thread.join()


def honest(token: bytes, **changes):
    """The end that listens, as it should be, but for `changes` of its greeting."""

    def answer(connection):
        theirs = decode_greeting(sockets.receive(connection, GREETING_BYTES, soon()))
        mine = new_greeting(theirs.kind)._replace(**changes)
        sockets.send(connection, [mine.encode()], soon())
        key = connection_key(token, theirs, mine)
        proof = sockets.receive(connection, PROOF_BYTES, soon())
        if not is_proof(proof, connecting_proof(key)):
            raise HandshakeError("no token")
        sockets.send(connection, [listening_proof(key)], soon())
        return key

    return answer


@pytest.mark.parametrize("token", [b"", b"secret", bytes(range(256))])
def test_both_ends_get_the_same_key_and_the_token_is_not_sent(token, monkeypatch):
    sent = []
    send = sockets.send
    monkeypatch.setattr(
        sockets, "send", lambda one, parts, limit: (sent.extend(parts), send(one, parts, limit))
    )
    with listening(honest(token)) as (connection, results):
        key = greet(connection, token, new_greeting(ConnectionKind.CONTROL), soon())
    assert results == [key]
    assert not token or token not in b"".join(sent)


@pytest.mark.parametrize(("mine", "theirs"), [(b"a", b"b"), (b"", b"b"), (b"a", b""), (b"a", b"a\0")])
def test_different_tokens_are_refused_by_the_end_that_listens(mine, theirs):
    with (
        listening(honest(theirs)) as (connection, results),
        pytest.raises(HandshakeError, match=r"quire\.token"),
    ):
        greet(connection, mine, new_greeting(ConnectionKind.CONTROL), soon())
    assert isinstance(results[0], HandshakeError)


def test_a_listener_without_the_token_is_refused():
    def impostor(connection):
        theirs = decode_greeting(sockets.receive(connection, GREETING_BYTES, soon()))
        sockets.send(connection, [new_greeting(theirs.kind).encode()], soon())
        proof = sockets.receive(connection, PROOF_BYTES, soon())
        sockets.send(connection, [proof], soon())  # what it was sent is all it knows

    with listening(impostor) as (connection, _), pytest.raises(HandshakeError, match="another token"):
        greet(connection, b"secret", new_greeting(ConnectionKind.CONTROL), soon())


def test_a_recorded_proof_is_no_proof():
    first, answer = new_greeting(ConnectionKind.CONTROL), new_greeting(ConnectionKind.CONTROL)
    recorded = connecting_proof(connection_key(b"secret", first, answer))
    fresh = connection_key(b"secret", first, new_greeting(ConnectionKind.CONTROL))
    assert not is_proof(recorded, connecting_proof(fresh))


@pytest.mark.parametrize("field", ["kind", "stream", "link_id", "nonce"])
def test_the_key_depends_on_all_of_the_greeting(field):
    one = Greeting(ConnectionKind.CONTROL, 0, 0, bytes(32))
    changes = {"kind": ConnectionKind.STREAM, "stream": 1, "link_id": 1, "nonce": bytes([1]) * 32}
    other = one._replace(**{field: changes[field]})
    assert connection_key(b"", one, one) != connection_key(b"", other, one)
    assert connection_key(b"", one, one) != connection_key(b"", one, other)


def test_another_version_is_named():
    with (
        listening(honest(b"", version=7)) as (connection, _),
        pytest.raises(HandshakeError, match=f"version 7 .* {handshake.PROTOCOL_VERSION}"),
    ):
        greet(connection, b"", new_greeting(ConnectionKind.CONTROL), soon())


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, bytes(100)])
def test_another_protocol_is_named(data):
    def answer(connection):
        sockets.receive(connection, GREETING_BYTES, soon())
        sockets.send(connection, [data], soon())

    with listening(answer) as (connection, _), pytest.raises(HandshakeError, match="another protocol"):
        greet(connection, b"", new_greeting(ConnectionKind.CONTROL), soon())


def test_a_listener_that_says_nothing_costs_no_more_than_the_deadline():
    with listening(lambda one: sockets.receive(one, GREETING_BYTES + 1, soon())) as (connection, _):
        with pytest.raises(TimeoutError):
            greet(connection, b"", new_greeting(ConnectionKind.CONTROL), time.monotonic() + 0.01)
        connection.close()
