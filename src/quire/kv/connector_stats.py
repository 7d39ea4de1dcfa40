"""What a KV connector counts."""

from __future__ import annotations

import msgspec


class KVConnectorStats(msgspec.Struct, array_like=True, gc=False):
    """What a connector has stored, and its counters since the engine started."""

    capacity_bytes: int = 0
    num_stored_blocks: int = 0
    stored_bytes: int = 0
    num_loaded_blocks: int = 0
    num_failed_reads: int = 0  # blocks that were found, but damaged, overwritten or unreadable
    num_written_blocks: int = 0
    num_failed_writes: int = 0
    num_dropped_writes: int = 0  # blocks not stored because the writer was behind
    num_evicted_blocks: int = 0
    num_loads_chosen: int = 0  # prefixes found and loaded
    num_computations_chosen: int = 0  # prefixes found, but cheaper to compute
    load_seconds_per_block: float = 0.0  # moving average; 0: not measured yet
    compute_seconds_per_token: float = 0.0  # likewise, of prompts
