"""Statistics of KV connectors."""

from __future__ import annotations

import msgspec


class KVConnectorStats(msgspec.Struct, array_like=True, tag="store", gc=False):
    """What a connector to a store has stored, and its counters since the engine started."""

    capacity_bytes: int = 0
    num_stored_blocks: int = 0
    stored_bytes: int = 0
    num_loaded_blocks: int = 0
    num_memory_hits: int = 0  # blocks read from the memory in front of the disk, whether needed or not
    num_failed_reads: int = 0  # blocks that were found, but damaged, overwritten or unreadable
    num_written_blocks: int = 0
    num_failed_writes: int = 0
    num_dropped_writes: int = 0  # blocks not stored because the writer was behind
    num_evicted_blocks: int = 0
    num_loads_chosen: int = 0  # prefixes found and loaded
    num_computations_chosen: int = 0  # prefixes found, but cheaper to compute
    load_seconds_per_block: float = 0.0  # moving average; 0: not measured yet
    compute_seconds_per_token: float = 0.0  # likewise, of prompts


class KVPeerStats(msgspec.Struct, array_like=True, tag="peers", gc=False):
    """What a connector to other engines has lent and read since the engine started."""

    num_lent_prompts: int = 0  # held for a peer at their end
    num_loads_chosen: int = 0  # prompts that were, or are, to be read
    num_computations_chosen: int = 0  # prompts that a peer had, but cheaper to compute
    num_missing_prompts: int = 0  # that the peer had no more, or that it could not be asked for
    num_failed_loads: int = 0
    num_loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds_per_block: float = 0.0  # moving average; 0: not measured yet
    compute_seconds_per_token: float = 0.0  # likewise, of prompts
    num_prefix_lookups: int = 0  # prompts whose missing part peers were asked for
    num_prefixes_found: int = 0  # that a peer had a part of
    num_peers_by_transport: dict[str, int] = {}  # peers that are linked to, to read from
