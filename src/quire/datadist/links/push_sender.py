"""The sending end of a link's pushes: a PROMPT, or a MIX that has linked to another."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans
from quire.datadist.status import LLMException, LLMStatusCode, failure
from quire.datadist.wire import sockets
from quire.datadist.wire.protocol import (
    FRAME_LIMIT,
    ControlChannel,
    ProtocolError,
    expected,
    require_transfer,
)
from quire.datadist.wire.push_protocol import (
    FromPushReceiver,
    PushAccepted,
    PushCompleted,
    PushesReady,
    PushRefused,
    PushRequest,
)

REFUSALS = (
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    LLMStatusCode.LLM_PARAM_INVALID,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_FAILED,
)
"""Status codes of a refused push."""

FIRST_TRANSFER = 1 << 63  # transfer ids of pulls count from 1

SendSpans = Callable[[int, CacheMemory, ByteSpans, float], None]
"""`SourceEnd.send`, with nothing else sent concurrently."""


class PushSender:
    """Pushes bytes to a peer. Thread-safe.

    Args:
        connection: an authenticated connection for pushes.
        name: the peer's name in messages.
        send: moves bytes to the peer.
        end_link: takes the link down, with a reason.
    """

    def __init__(
        self, connection: socket.socket, name: str, send: SendSpans, end_link: Callable[[str], None]
    ) -> None:
        sockets.end_if_peer_vanishes(connection)
        self._channel = ControlChannel(connection, _decoder)
        self._name = name
        self._send = send
        self._end_link = end_link
        self._busy = threading.Lock()
        self._has_ended = False
        self._numbers = itertools.count(FIRST_TRANSFER)

    def announce(self) -> None:
        """Tell the peer that opened the connection to expect pushes; raise `OSError` if it is gone."""
        self._channel.send(PushesReady(), time.monotonic() + FRAME_LIMIT)

    def push(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Push `spans` to the destination in `request`.

        `transfer_id` and `timeout_ms` of the request are filled in.

        Raises:
            LLMException: LLM_NOT_YET_LINK (the link has ended), LLM_WAIT_PROCESS_TIMEOUT (it broke, and is
                down; or it was busy until the deadline), or why the peer refused.
        """
        if not self._busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise failure(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, f"the link with {self._name} is in use")
        try:
            if self._has_ended or self._channel.has_something():
                self._end_link("the peer no longer takes pushes")
                raise failure(LLMStatusCode.LLM_NOT_YET_LINK, f"{self._name} has ended the link")
            self._transfer(request, memory, spans, deadline)
        except LLMException:
            raise
        except Exception as error:
            self._end_link(f"a push failed: {error}")
            raise failure(
                LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
                f"the link with {self._name} broke in a push: {error}; link again",
            ) from error
        except BaseException:
            self._end_link("a push was interrupted")
            raise
        finally:
            self._busy.release()

    def shut_down(self) -> None:
        """Make a running push and all later ones fail. Thread-safe."""
        self._has_ended = True
        self._channel.shut_down()

    def close(self) -> None:
        """Close the connection, when the link is down."""
        self.shut_down()
        with self._busy:
            self._channel.close()

    def _transfer(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        request.transfer_id = next(self._numbers)
        request.timeout_ms = int(sockets.seconds_left(deadline) * 1e3)
        self._channel.send(request, deadline)
        answer = self._channel.receive(deadline)
        if isinstance(answer, PushRefused):
            require_transfer(answer.transfer_id, request.transfer_id)
            if answer.status_code not in REFUSALS:
                raise ProtocolError(f"the peer refused a push with status {answer.status_code}")
            raise failure(LLMStatusCode(answer.status_code), answer.reason)
        require_transfer(expected(PushAccepted, answer).transfer_id, request.transfer_id)
        self._send(request.transfer_id, memory, spans, deadline)
        completed = self._channel.expect(PushCompleted, deadline)
        require_transfer(completed.transfer_id, request.transfer_id)


_decoder = msgspec.msgpack.Decoder(FromPushReceiver)
