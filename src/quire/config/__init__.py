"""Every knob of Quire: a field with its default, limits, unit and meaning.

Validation, command-line flags and documentation all come from these fields (see `quire.limits` and
`quire.cli.options`), so a knob that is not here does not exist. An unknown name is an error that suggests the
nearest known one.
"""

from __future__ import annotations

from quire.config.batches import BatchConfig
from quire.config.cache_eviction import (
    AdaptiveRKVConfig,
    AggregationMode,
    CacheEvictionConfig,
    KVCrushAnchorPointMode,
    KVCrushConfig,
    ScorePooling,
)
from quire.config.chat_template import ChatTemplateConfig
from quire.config.connections import ConnectionConfig
from quire.config.dynamo import DynamoConfig
from quire.config.edge import EdgeConfig, host_name
from quire.config.engine import BUILT_IN_MODEL, BUILT_IN_MODELS, EngineConfig, EngineRole
from quire.config.fields import (
    Choice,
    SettableConfig,
    check_limits,
    config,
    knob,
    refuse_blank_key,
    refuse_unknown_names,
    settable_config,
    stands_for,
)
from quire.config.kv import KVEventsConfig, KVTierConfig, KVTransferConfig
from quire.config.ray import RayConfig
from quire.config.router import RouterConfig, engine_url
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ServerConfig
from quire.config.sparse_attention import SparseAttentionConfig, SparseAttentionMode
from quire.config.speculation import SpeculationConfig
from quire.config.supervision import SupervisionConfig
from quire.config.tenant import TenantConfig

__all__ = [
    "BUILT_IN_MODEL",
    "BUILT_IN_MODELS",
    "AdaptiveRKVConfig",
    "AggregationMode",
    "BatchConfig",
    "CacheEvictionConfig",
    "ChatTemplateConfig",
    "Choice",
    "ConnectionConfig",
    "DynamoConfig",
    "EdgeConfig",
    "EngineConfig",
    "EngineRole",
    "KVCrushAnchorPointMode",
    "KVCrushConfig",
    "KVEventsConfig",
    "KVTierConfig",
    "KVTransferConfig",
    "RayConfig",
    "RouterConfig",
    "SchedulerConfig",
    "ScorePooling",
    "ServerConfig",
    "SettableConfig",
    "SparseAttentionConfig",
    "SparseAttentionMode",
    "SpeculationConfig",
    "SupervisionConfig",
    "TenantConfig",
    "check_limits",
    "config",
    "engine_url",
    "host_name",
    "knob",
    "refuse_blank_key",
    "refuse_unknown_names",
    "settable_config",
    "stands_for",
]
