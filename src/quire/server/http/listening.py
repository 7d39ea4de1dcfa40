"""A server's listening socket, its certificate, and the URL for clients."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from quire.config import EdgeConfig
from quire.errors import ConfigError
from quire.server.http.stopping import cancelled_at_end
from quire.server.http.tls import ServerCertificate
from quire.server.http.unix_socket import unix_socket

_AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Listener:
    """A server's socket and certificate.

    Args:
        socket: bound, not yet listening.
        host: the configured host.
        certificate: the TLS certificate; None: no TLS.
    """

    socket: socket.socket
    host: str
    certificate: ServerCertificate | None

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of connections; None without TLS."""
        return None if self.certificate is None else self.certificate.context

    @property
    def url(self) -> str:
        """The URL for clients on this machine; for a Unix socket, `unix:` and its path."""
        if self.socket.family == socket.AF_UNIX:
            return f"unix:{self.socket.getsockname()}"
        return url_of(self.host, self.socket, scheme="http" if self.certificate is None else "https")

    @property
    def curl(self) -> str:
        """Arguments of curl for the server's URL, to be followed by the path without a space."""
        if self.socket.family == socket.AF_UNIX:
            scheme = "http" if self.certificate is None else "https"
            return f"--unix-socket {shlex.quote(self.socket.getsockname())} {scheme}://localhost"
        return self.url

    @contextlib.asynccontextmanager
    async def with_current_certificate(self) -> AsyncIterator[None]:
        """Reload the certificate whenever it changes, for the duration of the context."""
        if self.certificate is None:
            yield
            return
        async with cancelled_at_end(self.certificate.watch()):
            yield


@contextlib.contextmanager
def listener(host: str, port: int, edge: EdgeConfig) -> Iterator[Listener]:
    """Bind a server's socket and load its certificate for the duration of the context.

    Args:
        host, port: TCP address.
        edge: may name a Unix socket instead, and a certificate.

    Raises:
        ConfigError: the server cannot listen at the address, or the certificate is unusable.
    """
    certificate = ServerCertificate(edge) if edge.ssl_certfile else None
    place = (
        unix_socket(edge.uds, edge.uds_access) if edge.uds else contextlib.closing(bound_socket(host, port))
    )
    with place as bound:
        yield Listener(bound, host, certificate)


def is_loopback(host: str) -> bool:
    """Whether `host` is only reachable from this machine; an empty host means all addresses.

    Raises:
        ConfigError: the address does not exist.
    """
    *_, address = _address_info(host, 0)
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to an address, not yet listening.

    Args:
        host, port: TCP address.
        shared: whether others that say so, too, may listen there; each gets some of the connections.

    Raises:
        ConfigError: the address does not exist, is in use, or is not permitted.
    """
    family, kind, protocol, _, address = _address_info(host, port)
    try:
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise _unusable(host, port, error) from None
    return bound


def _address_info(host: str, port: int) -> _AddressInfo:
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port} ({error}); choose another host or port")


def url_of(host: str, bound: socket.socket, *, scheme: str = "http") -> str:
    """Return the URL of a TCP socket for clients on this machine."""
    address, port = bound.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, host or address)
    name = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{name}:{port}"
