"""Sockets, TLS, allowed hosts, CORS and access log of an HTTP server."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Le

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError

_HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:/@]*)(?::[0-9]*)?")


@config
class EdgeConfig:
    """How clients reach a server or a router."""

    uds: str = knob(
        default="",
        help="Path of a Unix socket to listen on, instead of host and port. A stale socket is replaced. "
        "Empty: none.",
    )
    uds_access: Literal["owner", "group", "all"] = knob(
        default="owner", help="Users of this machine that may connect to the Unix socket uds."
    )
    ssl_certfile: str = knob(
        default="",
        help="File with the server's certificate and those between it and its root, as PEM. With it, the "
        "server speaks TLS 1.2 or newer, and nothing else. Read again when it changes.",
    )
    ssl_keyfile: str = knob(
        default="",
        help="File with the private key of ssl_certfile, as PEM, not encrypted. Empty: in the same file.",
    )
    ssl_ca_certs: str = knob(
        default="",
        help="File with certificates, as PEM, one of which must have signed the certificate that each client "
        "has to present. Empty: clients need none.",
    )
    allowed_hosts: tuple[str, ...] = knob(
        default=(),
        unit="names",
        help="Names and addresses that clients may call the server by, in the Host header, besides those of "
        "this machine itself: api.example.com, or *.example.com for all below it. *: any. Empty: any, but on "
        "a loopback address only names of this machine, so that no web page can pass for the server.",
    )
    cors_origins: tuple[str, ...] = knob(
        default=(),
        unit="origins",
        help="Web pages that may call the server from a browser, by origin: https://chat.example.com, or * "
        "for all. Empty: no pages but the server's own.",
    )
    monitoring_port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=0,
        help="TCP port where a thread of its own answers /health, /live and /metrics, without an API key, "
        "on the address of the other port, whatever the load. 0: none; the other port answers them, too.",
    )
    access_log: Literal["off", "text", "json"] = knob(
        default="off",
        help="Format of the access log on standard output, one line per finished request; or off.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        for given in self.allowed_hosts:
            if not host_name(given):
                raise ConfigError(
                    f"EdgeConfig.allowed_hosts has {given!r:.200}; it must be a name or an address, as in "
                    "api.example.com"
                )
        for given in self.cors_origins:
            if not _is_origin(given):
                raise ConfigError(
                    f"EdgeConfig.cors_origins has {given!r:.200}; it must be * or an origin, which ends "
                    "with its host or port, as in https://chat.example.com"
                )
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"EdgeConfig.{name} is given without EdgeConfig.ssl_certfile; give both")


def host_name(authority: str) -> str:
    """Return the host of a Host header in its one spelling, without its port; empty if there is none.

    Args:
        authority: such as `Example.com:8000` or `[::1]`.
    """
    match = _HOST.fullmatch(authority)
    if match is None:
        return ""
    name = match[1].lower().removesuffix(".")
    if not name.startswith("["):
        return name
    try:
        return str(ipaddress.IPv6Address(name[1:-1]))
    except ValueError:
        return ""


def _is_origin(text: str) -> bool:
    if text == "*":
        return True
    try:
        parts = urlsplit(text)
        is_whole = parts.hostname is not None and f"{parts.scheme}://{parts.netloc}" == text
        return is_whole and parts.username is None and parts.port != 0 and text == text.lower()
    except ValueError:
        return False
