"""Peers of a PROMPT or a DECODER that speak the protocol by hand, and need not keep to it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from quire.datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from quire.datadist.transports.tcp import TcpParameters
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    BYTE_ORDER,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    OfferAccepted,
    TransportOffer,
    decoder_channel,
)

PROMPT_ID, DECODER_ID = 1, 2


def soon() -> float:
    return time.monotonic() + 20


@contextlib.contextmanager
def started(role: LLMRole, cluster_id: int, **options: str) -> Iterator[LLMDataDist]:
    """An `LLMDataDist` on this host; options in Python's spelling, `token` for `quire.token`."""
    config = LLMConfig()
    config.device_id, config.sync_kv_timeout = 0, 5000
    config.listen_ip_info = "127.0.0.1:0"
    config.ge_options = {"quire.device": "cpu", **{f"quire.{name}": text for name, text in options.items()}}
    side = LLMDataDist(role, cluster_id)
    side.init(config.generate_options())
    try:
        yield side
    finally:
        side.finalize()


def address_of(prompt: LLMDataDist, cluster_id: int = PROMPT_ID) -> LLMClusterInfo:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = cluster_id
    peer.append_remote_ip_info("127.0.0.1", prompt.listen_port)
    return peer


def connection_to(prompt: LLMDataDist) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", prompt.listen_port))
    connection.setblocking(False)
    return connection


class RawDecoder:
    """Links as a DECODER does, and then sends what a test says."""

    def __init__(self, prompt: LLMDataDist, token: bytes = b"", cluster_id: int = DECODER_ID) -> None:
        self.prompt = prompt
        self.cluster_id = cluster_id
        self.connection = connection_to(prompt)
        self.streams: list[socket.socket] = []
        self.key = greet(self.connection, token, new_greeting(ConnectionKind.CONTROL), soon())
        self.channel = decoder_channel(self.connection)
        self.offer: LinkOffer | None = None

    def request(self, **changes) -> None:
        fields = {
            "prompt_cluster_id": PROMPT_ID,
            "decoder_cluster_id": self.cluster_id,
            "byte_order": BYTE_ORDER,
            "identity": {},
            "use_checksum": False,
            "transports": [TransportOffer("tcp", TcpParameters(1).encode())],
            "block_size": 0,
        }
        self.channel.send(LinkRequest(**(fields | changes)), soon())

    def open_stream(self, stream: int = 0, link_id: int | None = None, key: bytes | None = None) -> None:
        connection = connection_to(self.prompt)
        self.streams.append(connection)
        greeting = new_greeting(
            ConnectionKind.STREAM, stream, self.offer.link_id if link_id is None else link_id
        )
        greet(connection, self.key if key is None else key, greeting, soon())

    def link(self) -> RawDecoder:
        self.request()
        self.offer = self.channel.expect(LinkOffer, soon())
        self.open_stream()
        self.channel.send(OfferAccepted(), soon())
        self.channel.expect(LinkEstablished, soon())
        return self

    def close(self) -> None:
        for one in (self.connection, *self.streams):
            one.close()

    def __enter__(self) -> RawDecoder:
        return self

    def __exit__(self, *_) -> None:
        self.close()
