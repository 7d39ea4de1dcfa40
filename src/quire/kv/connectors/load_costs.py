"""Whether loading KV is cheaper than recomputing it, by measurements of the running engine."""

from __future__ import annotations

import math
import threading

_MIN_STEP_TOKENS = 16  # a step of fewer tokens says little about the cost of a prompt's
_MEMORY_TOKENS = 4096  # tokens after which a measured step counts 1/e
_MEMORY_BLOCKS = 64  # blocks after which a measured load counts 1/e
_TRIAL_INTERVAL = 32  # one in this many prefixes that are cheaper to compute is loaded, to measure again


class LoadCosts:
    """Exponential moving averages of both costs. May be used by several threads.

    As long as one of them is unknown, loading is preferred.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.seconds_per_token = 0.0  # computed; 0: unknown
        self.seconds_per_block = 0.0  # loaded; 0: unknown
        self._block_size = block_size
        self._num_refused = 0
        self._lock = threading.Lock()

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """Take note of a step that computed `num_tokens`."""
        if num_tokens >= _MIN_STEP_TOKENS:
            with self._lock:
                self.seconds_per_token = _average(
                    self.seconds_per_token, seconds / num_tokens, num_tokens / _MEMORY_TOKENS
                )

    def note_load(self, seconds: float, num_blocks: int) -> None:
        """Take note of a load that took `seconds` from its first read to its last."""
        with self._lock:
            self.seconds_per_block = _average(
                self.seconds_per_block, seconds / num_blocks, num_blocks / _MEMORY_BLOCKS
            )

    def seconds_to_compute(self, num_blocks: int) -> float:
        """Return how long `num_blocks` take to compute; 0: unknown."""
        return num_blocks * self._block_size * self.seconds_per_token

    def prefers_loading(self, num_blocks: int, num_queued: int, num_in_memory: int = 0) -> bool:
        """Return whether to load `num_blocks`, which `num_queued` blocks of other loads precede.

        Those of `num_blocks` that are in this machine's memory, `num_in_memory`, take next to no time.
        """
        with self._lock:
            load = (num_blocks - num_in_memory + num_queued) * self.seconds_per_block
            compute = self.seconds_to_compute(num_blocks)
            if not load or not compute or load <= compute:
                return True
            self._num_refused = (self._num_refused + 1) % _TRIAL_INTERVAL
            return self._num_refused == 0


def _average(old: float, new: float, weight: float) -> float:
    return new if not old else old + (new - old) * (1 - math.exp(-weight))
