"""Connections on which a test sends bytes, and reads answers as they are."""

import contextlib
import json
import socket
from typing import NamedTuple

import httpx

COMPLETION = json.dumps({"model": "fake", "prompt": "Hi"}).encode()


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def error(self):
        return json.loads(self.body)["error"]


class RawConnection:
    """One connection, once it is connected; reading waits for at most a minute."""

    def __init__(self, url, *, receive_buffer=None):
        self.socket = socket.socket()
        self.socket.settimeout(60)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")
        self._address = httpx.URL(url)

    def connect(self):
        self.socket.connect((self._address.host, self._address.port))
        return self

    def send(self, *pieces):
        """Send pieces, each by itself, as far as the server still reads."""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.socket.sendall(piece)

    def answer(self):
        """Read one answer."""
        status = int(self.reader.readline().split()[1])
        length = None
        while (line := self.reader.readline()) != b"\r\n":
            name, value = line.lower().split(b":", 1)
            if name == b"content-length":
                length = int(value)
        return Answer(status, self.reader.read(length))

    def is_closed(self):
        """Wait until the server closes the connection; return whether it sent nothing before."""
        try:
            return self.reader.read() == b""
        except ConnectionResetError:
            return True

    def close(self):
        self.reader.close()
        self.socket.close()


def request(path="/live", *headers, method="GET", body=b""):
    """Return a request as it is sent; a body comes with its length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def completion_head(*headers):
    """Return the header of a request for a completion, without its length."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def chunked(body, size):
    """Return a body in chunks of this size, with the last chunk."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
