"""The available transports, by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.datadist.transports import nixl_agent
from quire.datadist.transports.interface import Transport
from quire.datadist.transports.nixl import NixlTransport
from quire.datadist.transports.shared_memory import SharedMemoryTransport
from quire.datadist.transports.tcp import TcpTransport

logger = logging.getLogger(__name__)

DEFAULT_TRANSPORTS = ("shared_memory", "tcp")
"""Names of the default transports, the best first."""

TRANSPORT_NAMES = (*DEFAULT_TRANSPORTS, "nixl")


def transport_names(text: str) -> tuple[str, ...]:
    """Return the names in an option's text.

    Raises:
        ValueError: the text is invalid; the message follows the option's name.
    """
    names = tuple(text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(TRANSPORT_NAMES):
        known = ", ".join(TRANSPORT_NAMES)
        raise ValueError(f"is {text!r}; it takes each once, with commas between: {known}")
    if "nixl" in names and not nixl_agent.is_installed():
        raise ValueError("names nixl, but NIXL is not installed; pip install 'quire[cluster]'")
    return names


def open_transports(names: Sequence[str], *, listens: bool, num_tcp_streams: int) -> list[Transport]:
    """Return the transports with these names, in order, without those that are unusable here.

    Args:
        names: names in `TRANSPORT_NAMES`.
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
