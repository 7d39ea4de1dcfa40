"""Building the connector to other engines that the configuration asks for."""

from __future__ import annotations

import functools
import ipaddress
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.building.kv_identity import kv_identity
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig, KVTransferConfig
    from quire.engine.memory.plan import MemoryPlan
    from quire.kv.blocks.events import KVEventSink
    from quire.kv.connectors.interface import KVConnector
    from quire.kv.connectors.step_times import StepMark
    from quire.kv.peers.connector import PeerConnector
    from quire.models.config import ModelConfig

MAX_ASKED_PEERS = 16
"""Peers that are asked about a prompt; each costs a message for each."""


def build_peers(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> PeerConnector:
    """Return the connector of an engine that shares KV with others.

    The identity of the KV, which peers compare, is computed in a thread, since it reads all weights.

    Raises:
        ConfigError: an address or a transport is invalid.
    """
    from quire.kv.peers.connector import PeerConnector, PeerOptions

    transfer = config.kv_transfer
    lends = config.role == "prefill" or transfer.kv_transfer_port > 0
    address = _address(transfer) if lends else None
    transports = _transport_names(transfer.kv_transports)
    identity = _in_thread(functools.partial(_identity, config, model_path, model_config, plan))
    return PeerConnector(
        plan.block_size,
        PeerOptions(
            listen_address=address,
            asked_addresses=_asked_addresses(transfer.kv_peers),
            token=transfer.kv_transfer_token.encode(),
            transports=transports,
            identity=identity.result,
            timeout=config.scheduler.kv_transfer_timeout,
            windows=plan.windows,
            mark=_step_mark(config),
        ),
    )


def _step_mark(config: EngineConfig) -> Callable[[], StepMark] | None:
    """Return the function that marks a point between steps on a GPU; None: steps run on the host."""
    if config.device != "cuda":
        return None
    from quire.kernels.devices.cuda_copies import CudaCopies

    return CudaCopies().mark


def _identity(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> dict[str, str]:
    """Return the identity for peers; without windows and states, links negotiate the block size."""
    identity = kv_identity(config, model_path, model_config, plan)
    if not plan.windows and plan.states is None:
        del identity["block size"]
    return identity


def lending_address(connector: KVConnector | None) -> tuple[str, int] | None:
    """Return where peers read what a connector lends; None: it lends nothing."""
    if connector is None:
        return None
    from quire.kv.peers.connector import PeerConnector

    return connector.address if isinstance(connector, PeerConnector) else None


def release_kv(connector: KVConnector | None, transfer_id: str) -> None:
    """End what a connector lends under a transfer id, also if that is offered later; else do nothing."""
    if connector is None:
        return
    from quire.kv.peers.connector import PeerConnector

    if isinstance(connector, PeerConnector):
        connector.release(transfer_id)


def cached_block_events(connector: KVConnector | None) -> Sequence[KVEventSink]:
    """Return the sinks of each cache group's prefix cache events for peers' reads, if there are any."""
    if connector is None:
        return ()
    from quire.kv.peers.connector import PeerConnector

    return connector.kv_events if isinstance(connector, PeerConnector) else ()


def cached_state_events(connector: KVConnector | None) -> KVEventSink | None:
    """Return the sink of events of the states that are kept for the prefix cache, if peers read them."""
    if connector is None:
        return None
    from quire.kv.peers.connector import PeerConnector

    return connector.state_events if isinstance(connector, PeerConnector) else None


def _asked_addresses(setting: str) -> list[tuple[str, int]]:
    addresses = [_peer_address(setting, part) for part in setting.split(",") if setting]
    if len(addresses) > MAX_ASKED_PEERS:
        raise ConfigError(
            f"KVTransferConfig.kv_peers has {len(addresses)} addresses; the maximum is {MAX_ASKED_PEERS}"
        )
    return addresses


def _peer_address(setting: str, part: str) -> tuple[str, int]:
    host, _, port = part.strip().partition(":")
    try:
        ipaddress.IPv4Address(host)
        if not 1 <= int(port) <= 65535:
            raise ValueError(port)
    except ValueError as error:
        raise ConfigError(
            f"KVTransferConfig.kv_peers is {setting!r}, and {part!r} is not an IPv4 address and a port, such "
            "as 10.0.0.2:7000"
        ) from error
    return host, int(port)


def _transport_names(setting: str) -> Sequence[str]:
    from quire.datadist.transports.opening import transport_names

    try:
        return transport_names(setting)
    except ValueError as error:
        raise ConfigError(f"KVTransferConfig.kv_transports {error}") from error


def _address(transfer: KVTransferConfig) -> tuple[str, int]:
    host = transfer.kv_transfer_host
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise ConfigError(f"KVTransferConfig.kv_transfer_host is {host!r}, not an IPv4 address") from error
    if address.is_unspecified:
        raise ConfigError(
            f"KVTransferConfig.kv_transfer_host is {host!r}, which peers cannot connect to; give the address "
            "that this machine has in their network"
        )
    return host, transfer.kv_transfer_port


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
