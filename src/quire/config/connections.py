"""Limits of HTTP connections."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from quire.config.fields import check_limits, config, knob
from quire.limits import NonNegativeInt, PositiveInt, Timeout


@config
class ConnectionConfig:
    """Limits of connections to a server or a router."""

    max_header_bytes: Annotated[int, Ge(256), Le(1_048_576)] = knob(
        default=16_384,
        unit="bytes",
        help="Maximum size of a request's header, with its request line; a larger one is refused with "
        "status 431. Also the most that may be sent within a chunked body without any of the body.",
    )
    max_headers: PositiveInt = knob(
        default=100,
        unit="header fields",
        help="Maximum number of header fields of a request; more are refused with status 431.",
    )
    header_timeout: Timeout = knob(
        default=10.0,
        unit="seconds",
        help="Time that a client has to send the header of a request, and for its TLS handshake.",
    )
    body_timeout: Timeout = knob(
        default=300.0, unit="seconds", help="Time that a client has to send the whole body of a request."
    )
    body_idle_timeout: Timeout = knob(
        default=30.0,
        unit="seconds",
        help="Maximum pause while a body arrives, and time to send the rest of a body whose request has "
        "been answered.",
    )
    keep_alive_timeout: Timeout = knob(
        default=60.0,
        unit="seconds",
        help="Time that a connection stays open after an answer without another request. Clients should "
        "keep idle connections for less, so that they close them first.",
    )
    write_timeout: Timeout = knob(
        default=30.0,
        unit="seconds",
        help="Time that a client has to read, once more than 64 KiB wait for it, until fewer than 16 KiB do; "
        "then its connection is closed and its request aborted.",
    )
    max_connections: NonNegativeInt = knob(
        default=0,
        unit="connections",
        help="Maximum number of open connections. One more closes the one that has waited longest for its "
        "client to send a request; if all have requests in progress, it is refused with status 503. 0: as "
        "many as the limit of open files leaves room for, at most 16,384.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
