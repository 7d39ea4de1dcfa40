"""Mutual authentication by token, before anything else is read.

Both ends send a greeting of fixed size, with a nonce. The connection's key is derived from the token and both
greetings (HMAC-SHA256), and both ends prove that they have it, the connecting end first. So the token is
never sent, and a recorded proof is useless. Other connections of a link are authenticated with the key of its
first one instead of the token.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import socket
import struct
from typing import NamedTuple

from quire.datadist.wire import sockets

PROTOCOL_VERSION = 5

_MAGIC = b"QuireKV\n"
_GREETING = struct.Struct("<8sHBBQ32s")
GREETING_BYTES = _GREETING.size
PROOF_BYTES = hashlib.sha256().digest_size
NONCE_BYTES = 32


class ConnectionKind(enum.IntEnum):
    """What a connection is for: the side that listens pushes over PUSHES, the other over BACK_PUSHES."""

    CONTROL = 1
    STREAM = 2
    PUSHES = 3
    BACK_PUSHES = 4


class HandshakeError(ConnectionError):
    """The peer is not an LLMDataDist of this version, or does not have the token."""


class Greeting(NamedTuple):
    """The first message of either end.

    Attributes:
        kind: what the connection is for; the end that listens repeats it.
        stream: of a stream, its number in the link.
        link_id: id of a stream or pushes, their link's; else 0.
        nonce: random.
        version: version of the protocol.
    """

    kind: ConnectionKind
    stream: int
    link_id: int
    nonce: bytes
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """Return the message."""
        return _GREETING.pack(_MAGIC, self.version, self.kind, self.stream, self.link_id, self.nonce)


def new_greeting(kind: ConnectionKind, stream: int = 0, link_id: int = 0) -> Greeting:
    """Return a greeting with a fresh nonce."""
    return Greeting(kind, stream, link_id, secrets.token_bytes(NONCE_BYTES))


def decode_greeting(message: bytes | bytearray) -> Greeting:
    """Return a greeting of any version.

    Raises:
        HandshakeError: it is not a greeting.
    """
    magic, version, kind, stream, link_id, nonce = _GREETING.unpack(message)
    if magic != _MAGIC or kind not in tuple(ConnectionKind):
        raise HandshakeError("the peer speaks another protocol")
    return Greeting(ConnectionKind(kind), stream, link_id, nonce, version)


def require_version(greeting: Greeting) -> None:
    """Raise `HandshakeError` if the peer has another version."""
    if greeting.version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"the peer has version {greeting.version} of the protocol, this end {PROTOCOL_VERSION}; "
            "install the same version of Quire on both"
        )


def connection_key(secret: bytes, connecting: Greeting, listening: Greeting) -> bytes:
    """Derive the key of a connection from the token, or, for a stream, from the link's key."""
    return _hmac(secret, b"key" + connecting.encode() + listening.encode())


def connecting_proof(key: bytes) -> bytes:
    """Return the proof of the end that connects."""
    return _hmac(key, b"connecting")


def listening_proof(key: bytes) -> bytes:
    """Return the proof of the end that listens."""
    return _hmac(key, b"listening")


def is_proof(given: bytes | bytearray, expected: bytes) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(given, expected)


def greet(connection: socket.socket, secret: bytes, greeting: Greeting, deadline: float) -> bytes:
    """Authenticate both ends, as the connecting one; return the connection's key.

    Raises:
        HandshakeError: one end could not prove that it has the token.
        OSError: no answer in time, or the connection ended.
    """
    sockets.send(connection, [greeting.encode()], deadline)
    answer = decode_greeting(sockets.receive(connection, GREETING_BYTES, deadline))
    require_version(answer)
    key = connection_key(secret, greeting, answer)
    sockets.send(connection, [connecting_proof(key)], deadline)
    try:
        proof = sockets.receive(connection, PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise HandshakeError("the peer refused this end's proof; is quire.token the same on both?") from error
    if not is_proof(proof, listening_proof(key)):
        raise HandshakeError("the peer has another token; quire.token must be the same on both")
    return key


def _hmac(key: bytes, message: bytes) -> bytes:
    """HMAC pads short keys with zeros, which would make "a" and "a\\0" equal."""
    return hmac.digest(hashlib.sha256(key).digest(), message, "sha256")
