"""Building the connector to other engines that the configuration asks for."""

from __future__ import annotations

import functools
import ipaddress
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.kv_identity import kv_identity
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.datadist.transports.interface import Transport
    from quire.engine.memory_plan import MemoryPlan
    from quire.kv.connector import KVConnector
    from quire.kv.peers.connector import PeerConnector
    from quire.models.config import ModelConfig

logger = logging.getLogger(__name__)

TCP_STREAMS = 4
"""TCP connections that a large transfer is shared by."""


def build_peers(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> PeerConnector:
    """Return the connector of an engine that only prefills or only decodes.

    What the KV is, for peers to compare, is found out in a thread, since that reads all weights.

    Raises:
        ConfigError: the address or a transport is invalid.
    """
    from quire.kv.peers.connector import PeerConnector, PeerOptions

    lends = config.role == "prefill"
    address = _address(config) if lends else None
    transports = _transports(config.kv_transports, listens=lends)
    identity = _in_thread(functools.partial(kv_identity, config, model_path, model_config, plan))
    return PeerConnector(
        plan.block_size,
        PeerOptions(
            listen_address=address,
            token=config.kv_transfer_token.encode(),
            transports=transports,
            identity=identity.result,
            timeout=config.scheduler.kv_transfer_timeout,
        ),
    )


def lending_address(connector: KVConnector | None) -> tuple[str, int] | None:
    """Return where peers read what a connector lends; None: it lends nothing."""
    if connector is None:
        return None
    from quire.kv.peers.connector import PeerConnector

    return connector.address if isinstance(connector, PeerConnector) else None


def _transports(setting: str, *, listens: bool) -> list[Transport]:
    from quire.datadist.transports.opening import open_transports, transport_names

    try:
        names = transport_names(setting)
    except ValueError as error:
        raise ConfigError(f"EngineConfig.kv_transports {error}") from error
    return open_transports(names, listens=listens, num_tcp_streams=TCP_STREAMS)


def _address(config: EngineConfig) -> tuple[str, int]:
    host = config.kv_transfer_host
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise ConfigError(f"EngineConfig.kv_transfer_host is {host!r}, which is no IPv4 address") from error
    if address.is_unspecified:
        raise ConfigError(
            f"EngineConfig.kv_transfer_host is {host!r}, which peers cannot connect to; give the address "
            "that this machine has in their network"
        )
    if not config.kv_transfer_token and not address.is_loopback:
        logger.warning(
            "lending KV at %s without kv_transfer_token: everyone who reaches it can read prompts' KV", host
        )
    return host, config.kv_transfer_port


def _in_thread(function: functools.partial[dict[str, str]]) -> Future[dict[str, str]]:
    """Call a function in a thread that ends with the process."""
    future: Future[dict[str, str]] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="kv-identity", daemon=True).start()
    return future
