"""The listening side: one thread that accepts connections, and one for each link."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from quire.datadist.links.door import MAX_UNPROVED, Door
from quire.datadist.links.prompt_link import LinkRefusedError, PromptLink
from quire.datadist.status import LLMStatusCode, failure
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, Greeting

logger = logging.getLogger(__name__)

MAX_LINKS = 512
MAX_LINK_OPERATIONS = 16
MAX_PROVED_WAITING = 512  # authenticated connections without an established link
END_LIMIT = 5.0  # seconds for threads to end

LinkFactory = Callable[[socket.socket, int, bytes], PromptLink]
"""Makes a link from an authenticated control connection, the link's id and the connection's key."""


class PromptService:
    """Listens until it is closed.

    Args:
        address: ip and port; port 0 is any free one.
        token: that peers must have; empty: none.
        new_link: makes a link.
        more_listeners: listening sockets of transports, which stay open.

    Raises:
        LLMException: LLM_FAILED: it cannot listen.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        new_link: LinkFactory,
        more_listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._token = token
        self._new_link = new_link
        self._listener = _listen(address)
        self._more_listeners = more_listeners
        self._links: dict[int, PromptLink] = {}  # by link id, including links being established
        self._linked: dict[int, PromptLink] = {}  # by the DECODER's cluster id
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._operations = threading.BoundedSemaphore(MAX_LINK_OPERATIONS)
        self._is_closed = False
        self._wake, self._wake_end = socket.socketpair()
        self._doorkeeper = threading.Thread(target=self._keep_door, name="datadist-door", daemon=True)
        self._doorkeeper.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def address(self) -> tuple[str, int]:
        """Ip and port that it listens on."""
        ip, port = self._listener.getsockname()
        return ip, port

    @property
    def transports(self) -> dict[int, str]:
        """Name of the transport to each linked DECODER."""
        with self._lock:
            return {cluster_id: link.transport for cluster_id, link in self._linked.items()}

    def link_of(self, cluster_id: int) -> PromptLink | None:
        """Return the link of a DECODER, if there is one."""
        with self._lock:
            return self._linked.get(cluster_id)

    def unlink(self, cluster_id: int) -> LLMStatusCode:
        """Drop the link of a DECODER; return LLM_SUCCESS or LLM_NOT_YET_LINK."""
        with self._lock:
            link = self._linked.pop(cluster_id, None)
        if link is None:
            return LLMStatusCode.LLM_NOT_YET_LINK
        link.drop("the PROMPT has unlinked")
        return LLMStatusCode.LLM_SUCCESS

    def close(self) -> None:
        """Stop listening, drop all links and end all threads."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
            threads = list(self._threads)
        self._wake_end.send(b"x")
        self._doorkeeper.join()
        for link in links:
            link.drop("the PROMPT has ended")
        deadline = time.monotonic() + END_LIMIT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wake.close()
        self._wake_end.close()

    def _keep_door(self) -> None:
        door = Door([self._listener, *self._more_listeners], self._wake, self._secret_of, self._admit)
        try:
            door.run()
        finally:
            self._listener.close()

    def _secret_of(self, greeting: Greeting) -> bytes | None:
        """Return the secret that a connection must prove to have; None: refuse it."""
        if greeting.kind is ConnectionKind.CONTROL:
            return self._token
        with self._lock:
            link = self._links.get(greeting.link_id)
        return None if link is None else link.key

    def _admit(self, connection: socket.socket, greeting: Greeting, key: bytes, deadline: float) -> bool:
        """Take over an authenticated connection; if this returns False, the caller closes it."""
        if greeting.kind is not ConnectionKind.CONTROL:
            with self._lock:
                link = self._links.get(greeting.link_id)
            if greeting.kind is ConnectionKind.PUSHES:
                return link is not None and link.attach_pushes(connection)
            if greeting.kind is ConnectionKind.BACK_PUSHES:
                return link is not None and link.attach_back_pushes(connection)
            source_end = None if link is None else link.source_end
            return source_end is not None and source_end.attach(greeting.stream, connection)
        with self._lock:
            if self._is_closed or len(self._links) - len(self._linked) >= MAX_PROVED_WAITING:
                return False
            link = self._new_link(connection, secrets.randbits(64), key)
            thread = threading.Thread(
                target=self._run_link, args=(link, deadline), name="datadist-link", daemon=True
            )
            self._links[link.link_id] = link
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads
            logger.warning("cannot serve another link: %s", error)
            with self._lock:
                del self._links[link.link_id]
                self._threads.discard(thread)
            return False
        return True

    def _run_link(self, link: PromptLink, deadline: float) -> None:
        try:
            with self._operations:
                link.establish(deadline, self._register)
            link.serve(self._unregister)
        except LinkRefusedError as error:
            logger.warning("refused a link with DECODER %s: %s", link.decoder_cluster_id, error)
        except sockets.PeerClosedError:
            logger.info("DECODER %s has closed its link", link.decoder_cluster_id)
        except OSError as error:
            logger.warning("dropped the link with DECODER %s: %s", link.decoder_cluster_id, error)
        except Exception:
            logger.exception("dropped the link with DECODER %s", link.decoder_cluster_id)
        finally:
            self._forget(link)

    def _register(self, link: PromptLink) -> None:
        cluster_id = link.decoder_cluster_id
        assert cluster_id is not None
        with self._lock:
            if self._is_closed:
                raise LinkRefusedError("the PROMPT has ended")
            if cluster_id not in self._linked and len(self._linked) >= MAX_LINKS:
                raise LinkRefusedError(f"the PROMPT has {MAX_LINKS} links, which is the limit")
            replaced = self._linked.get(cluster_id)
            self._linked[cluster_id] = link
        if replaced is not None:
            replaced.drop(f"DECODER {cluster_id} has linked again")

    def _unregister(self, link: PromptLink) -> None:
        with self._lock:
            if link.decoder_cluster_id is not None and self._linked.get(link.decoder_cluster_id) is link:
                del self._linked[link.decoder_cluster_id]

    def _forget(self, link: PromptLink) -> None:
        self._unregister(link)
        link.close()
        with self._lock:
            del self._links[link.link_id]
            self._threads.discard(threading.current_thread())


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        listener = socket.create_server(address, backlog=MAX_UNPROVED)  # sets SO_REUSEADDR
    except OSError as error:
        ip, port = address
        raise failure(
            LLMStatusCode.LLM_FAILED, f"cannot listen on {ip}:{port} (listen_ip_info): {error}"
        ) from error
    listener.setblocking(False)
    return listener
