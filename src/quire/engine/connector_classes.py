"""Custom KV connector classes, and what the memory plan needs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kv.connectors.interface import KVConnector
from quire.kv.tiers.connector import TierConnector
from quire.registry import Registry

if TYPE_CHECKING:
    from quire.config import EngineConfig

CONNECTORS: Registry[KVConnector] = Registry("EngineConfig.kv_connector", KVConnector, {})


def stages_kv(config: EngineConfig) -> bool:
    """Return whether blocks pass through a buffer of a GPU on their way to a tier.

    Raises:
        ConfigError: the class of the connector cannot be used.
    """
    if config.device != "cuda":
        return False
    if not config.kv_connector:
        return bool(config.kv_tier)
    return issubclass(CONNECTORS.class_of(config.kv_connector), TierConnector)
