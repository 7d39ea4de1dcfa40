"""Where a server listens: its socket, and the URL that clients use."""

from __future__ import annotations

import socket

from quire.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not yet listening.

    Raises:
        ConfigError: the address does not exist, is in use, or is not permitted.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from None
    return bound


def url_of(host: str, bound: socket.socket) -> str:
    """Return the URL that clients on this machine can use."""
    address, port = bound.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, host or address)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
