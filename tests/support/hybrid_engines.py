"""Engines of models whose layers keep a state, with tiny shapes, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checked_engine import CheckedEngine

BLOCK_SIZE = 4
LENGTHS = 90, 7, 41, 33
MAX_TOKENS = 14
SCHEDULER = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 240,
    "cache_interval_multiplier": 4,
}


class Engine(CheckedEngine):
    """One that has checkpoints at short intervals."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, max_tokens=MAX_TOKENS, **SCHEDULER | options)

    @property
    def checkpoints(self) -> Any:
        return self.core.scheduler.accounts.states.pool


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(5, 90, length) for length in LENGTHS]
