"""Scheduler and KV connector classes by dotted name, and what the memory plan needs to know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kv.connectors.interface import KVConnector
from quire.kv.tiers.connector import TierConnector
from quire.registry import Registry
from quire.scheduling.interface import SchedulerInterface

if TYPE_CHECKING:
    from quire.config import EngineConfig

CONNECTORS: Registry[KVConnector] = Registry("EngineConfig.kv_connector", KVConnector, {})

SCHEDULERS: Registry[SchedulerInterface] = Registry("EngineConfig.scheduler_cls", SchedulerInterface, {})


def keeps_all_tokens(config: EngineConfig) -> bool:
    """Return whether layers with a window keep the KV of all tokens, in one cache group with the others.

    A connector that is not `by_group` moves whole blocks of all layers, cache eviction has one block table
    for each sequence, and a scheduler of the user's own need not know of groups.

    Raises:
        ConfigError: the class of the scheduler or of the connector cannot be used.
    """
    if config.scheduler.use_cache_eviction:
        return True
    if config.kv_connector and not CONNECTORS.class_of(config.kv_connector).by_group:
        return True
    return not knows_groups(config)


def knows_groups(config: EngineConfig) -> bool:
    """Return whether the scheduler knows of cache groups and states: one of the user's own need not.

    Raises:
        ConfigError: the class of the scheduler cannot be used.
    """
    from quire.scheduling.scheduler import Scheduler

    return issubclass(SCHEDULERS.class_of(config.scheduler_cls), Scheduler)


def moves_states(config: EngineConfig) -> bool:
    """Return whether what moves the KV of an engine moves the states of recurrent layers (on a CPU).

    Raises:
        ConfigError: the class of the connector cannot be used.
    """
    if config.device == "cuda":
        return False
    if config.kv_connector:
        return CONNECTORS.class_of(config.kv_connector).moves_states
    return bool(config.kv_tiering.kv_tier) or config.shares_kv


def stages_kv(config: EngineConfig) -> bool:
    """Return whether blocks pass through a buffer of a GPU on their way to a tier.

    Raises:
        ConfigError: the class of the connector cannot be used.
    """
    if config.device != "cuda":
        return False
    if not config.kv_connector:
        return bool(config.kv_tiering.kv_tier)
    return issubclass(CONNECTORS.class_of(config.kv_connector), TierConnector)
