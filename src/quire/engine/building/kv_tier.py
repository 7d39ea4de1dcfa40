"""Building the KV tier that the configuration asks for."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.building.kv_identity import kv_fingerprint, shared_kv_identity
from quire.engine.memory.byte_sizes import GB
from quire.errors import ConfigError
from quire.kv.tiers.block_copier import BlockCopier
from quire.kv.tiers.cached_tier import CachedTier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.disk.region import FINGERPRINT_BYTES, RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from quire.kv.tiers.mooncake.client import StoreClient
from quire.kv.tiers.mooncake.tier import MooncakeTier
from quire.kv.tiers.tier import BlockTier, MemoryTier

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.memory.plan import MemoryPlan
    from quire.kv.cache.paged_cache import PagedAttentionCache
    from quire.models.config import ModelConfig

MIN_LENT_BYTES = 1 << 24
"""Memory that a Mooncake store takes from an engine, at least."""


def build_tier(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> TierConnector:
    """Return the connector to the tier that `config.kv_tiering.kv_tier` names, opened with the KV cache."""
    open_tier = functools.partial(_open, config, model_path, model_config, plan)
    return TierConnector(plan.block_size, open_tier)


def gpu_copier(kv_caches: Sequence[PagedAttentionCache], clock: object) -> BlockCopier:
    """Return the copier of caches in a GPU's memory, by whose clock steps are measured there."""
    from quire.kernels.devices.cuda_copies import CudaCopies
    from quire.kv.tiers.device_copier import DeviceCopier

    return DeviceCopier([cache.tensor for cache in kv_caches], CudaCopies())


def _open(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan, bytes_per_block: int
) -> BlockTier:
    """Open the tier.

    Raises:
        ConfigError: it does not hold a single block, its directory cannot be used, or Mooncake is missing.
    """
    tiering = config.kv_tiering
    capacity = round(tiering.kv_tier_size * GB)
    if tiering.kv_tier == "mooncake":
        return _mooncake(config, model_path, model_config, plan, bytes_per_block)
    if tiering.kv_tier == "memory":
        tier: BlockTier = MemoryTier(capacity, bytes_per_block, min_uses=tiering.kv_tier_min_uses)
    else:
        fingerprint = kv_fingerprint(config, model_path, model_config, plan)
        layout = RegionLayout(fingerprint, plan.block_size, bytes_per_block)
        directory = _directory(tiering.kv_tier_path)
        try:
            tier = DiskTier(directory, capacity, layout, min_uses=tiering.kv_tier_min_uses)
        except OSError as error:
            raise ConfigError(
                f"KVTierConfig.kv_tier_path is {tiering.kv_tier_path!r}, and {directory} cannot be used: "
                f"{error}; choose a directory that can be written to"
            ) from error
    if not tier.residents.num_places:
        raise ConfigError(
            f"KVTierConfig.kv_tier_size is {tiering.kv_tier_size} GB, too little for one block of "
            f"{tier.bytes_per_place} bytes; raise it to at least {_gigabytes(tier.bytes_per_place)}"
        )
    return _with_memory(tier, tiering.kv_tier_memory_size) if tiering.kv_tier_memory_size else tier


def _mooncake(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan, bytes_per_block: int
) -> BlockTier:
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "KVTierConfig.kv_tier is 'mooncake', but Mooncake is not installed; pip install 'quire[mooncake]'"
        )
    tiering = config.kv_tiering
    num_lent = round(tiering.kv_tier_size * GB)
    if 0 < num_lent < MIN_LENT_BYTES:
        raise ConfigError(
            f"KVTierConfig.kv_tier_size is {tiering.kv_tier_size} GB; a Mooncake store takes no less than "
            f"{_gigabytes(MIN_LENT_BYTES)} from an engine, or 0"
        )
    setup: dict[str, str | int] = {
        "local_hostname": config.kv_transfer.kv_transfer_host,
        "metadata_server": tiering.kv_tier_store_metadata,
        "global_segment_size": num_lent,
        "protocol": tiering.kv_tier_store_protocol,
        "rdma_devices": "",  # all
        "master_server_addr": tiering.kv_tier_store,
    }
    layout = RegionLayout(bytes(FINGERPRINT_BYTES), plan.block_size, bytes_per_block)
    identity = functools.partial(shared_kv_identity, config, model_path, model_config, plan)
    client = StoreClient(setup, layout.header_bytes + bytes_per_block)
    return MooncakeTier(client, layout, identity, min_uses=tiering.kv_tier_min_uses)


def _with_memory(tier: BlockTier, gigabytes: float) -> BlockTier:
    capacity = round(gigabytes * GB)
    if capacity < tier.bytes_per_block:
        raise ConfigError(
            f"KVTierConfig.kv_tier_memory_size is {gigabytes} GB, too little for one block of "
            f"{tier.bytes_per_block} bytes; raise it to at least {_gigabytes(tier.bytes_per_block)}, or "
            "set it to 0"
        )
    try:
        return CachedTier(tier, capacity)
    except OSError as error:
        tier.close()
        raise ConfigError(
            f"KVTierConfig.kv_tier_memory_size is {gigabytes} GB, which this machine does not have: {error}; "
            "lower it"
        ) from error


def _gigabytes(num_bytes: int) -> str:
    """Return bytes in GB, rounded up."""
    return f"{math.ceil(num_bytes / 1e3) / 1e6:.6f}"


def _directory(setting: str) -> Path:
    if setting != "auto":
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quire" / "kv"
