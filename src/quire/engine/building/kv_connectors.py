"""The KV connector that the configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.building.kv_peers import build_peers
from quire.engine.building.kv_tier import build_tier, gpu_copier
from quire.engine.connector_classes import CONNECTORS
from quire.kv.connectors.interface import KVConnector
from quire.kv.tiers.connector import TierConnector

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.memory.plan import MemoryPlan
    from quire.models.config import ModelConfig


def build_connector(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> KVConnector | None:
    """Return the connector, which moves the KV of the engine's device; None: none is asked for.

    Raises:
        ConfigError: its class or an option of it cannot be used.
    """
    connector = _build(config, model_path, model_config, plan)
    if config.device == "cuda" and isinstance(connector, TierConnector) and connector.copier_of is None:
        connector.copier_of = gpu_copier
    return connector


def _build(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> KVConnector | None:
    if config.kv_tier:
        return build_tier(config, model_path, model_config, plan)
    if config.shares_kv:
        return build_peers(config, model_path, model_config, plan)
    if not config.kv_connector:
        return None
    return CONNECTORS.build(config.kv_connector, block_size=config.scheduler.block_size)
