"""The transports there are, by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.datadist.transports.interface import Transport
from quire.datadist.transports.nixl import NixlTransport
from quire.datadist.transports.shared_memory import SharedMemoryTransport
from quire.datadist.transports.tcp import TcpTransport

logger = logging.getLogger(__name__)


def open_transports(names: Sequence[str], *, listens: bool, num_tcp_streams: int) -> list[Transport]:
    """Return transports, in the order of their names, but for those that cannot be used here.

    Args:
        names: of `options.TRANSPORT_NAMES`.
        listens: whether peers connect to this side.
        num_tcp_streams: maximum number of TCP connections of a link.
    """
    opened: list[Transport] = []
    for name in names:
        try:
            opened.append(_open(name, listens=listens, num_tcp_streams=num_tcp_streams))
        except OSError as error:
            logger.warning("%s cannot be used: %s", name, error)
    return opened


def _open(name: str, *, listens: bool, num_tcp_streams: int) -> Transport:
    if name == "shared_memory":
        return SharedMemoryTransport(listens=listens)
    return NixlTransport() if name == "nixl" else TcpTransport(num_tcp_streams)
