"""The KV connector that the configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.kv_peers import build_peers
from quire.engine.kv_tier import build_tier
from quire.kv.connector import KVConnector
from quire.registry import Registry

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.memory_plan import MemoryPlan
    from quire.models.config import ModelConfig

CONNECTORS: Registry[KVConnector] = Registry("EngineConfig.kv_connector", KVConnector, {})


def build_connector(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> KVConnector | None:
    """Return the connector; None: the engine moves no KV.

    Raises:
        ConfigError: the class cannot be used, or what a built-in connector is told.
    """
    if config.kv_tier:
        return build_tier(config, model_path, model_config, plan)
    if config.shares_kv:
        return build_peers(config, model_path, model_config, plan)
    if not config.kv_connector:
        return None
    return CONNECTORS.build(config.kv_connector, block_size=config.scheduler.block_size)
