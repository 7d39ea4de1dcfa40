"""What stands between clients and an HTTP server."""

from __future__ import annotations

from typing import Literal

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError


@config
class EdgeConfig:
    """How clients reach a server, be it an engine's or a router."""

    uds: str = knob(
        default="",
        help="Path of a Unix socket to listen on, instead of host and port. One that a dead server has left "
        "is replaced. Empty: none.",
    )
    uds_access: Literal["owner", "group", "all"] = knob(
        default="owner", help="Which users of this machine may connect to the Unix socket uds."
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

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"EdgeConfig.{name} is given without EdgeConfig.ssl_certfile; give both")
