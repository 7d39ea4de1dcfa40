"""Which engine has computed which beginnings of prompts, as far as the router remembers what it sent them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

CHUNK = 512
"""Bytes of a prompt that are remembered as one."""

MAX_CHUNKS = 256
"""Chunks of one prompt that are looked at: 128 KiB."""

MAX_ENGINES_PER_CHUNK = 4
"""Engines that are remembered for a chunk: those that computed it last."""


def chunk_keys(prompt: bytes) -> list[int]:
    """Return a key for each full chunk of a prompt, which stands for all that comes before it too.

    Python's hash of bytes is keyed afresh in each process, so that no client can choose prompts that collide.
    A collision costs nothing but a worse choice.
    """
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(prompt), MAX_CHUNKS * CHUNK) - CHUNK + 1, CHUNK):
        key = hash((key, prompt[start : start + CHUNK]))
        keys.append(key)
    return keys


class PrefixMemory:
    """Engines by chunk of a prompt, the least recently used chunks forgotten first.

    Args:
        max_chunks: number of chunks to remember.
    """

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._engines: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def matched_bytes(self, keys: Sequence[int], engines: Collection[int]) -> dict[int, int]:
        """Return for each of these engines how many bytes of a prompt's beginning it has been sent before.

        Args:
            keys: of the prompt's chunks.
            engines: their ids.
        """
        matched = dict.fromkeys(engines, 0)
        left = set(engines)
        for key in keys:
            left.intersection_update(self._engines.get(key, ()))
            if not left:
                break
            for engine in left:
                matched[engine] += CHUNK
        return matched

    def note(self, keys: Sequence[int], engine: int) -> None:
        """Remember that an engine computes a prompt with these chunks."""
        for key in reversed(keys):  # a beginning is of use without its end, but not the other way round
            others = [other for other in self._engines.pop(key, ()) if other != engine]
            self._engines[key] = (engine, *others[: MAX_ENGINES_PER_CHUNK - 1])
        while len(self._engines) > self._max_chunks:
            self._engines.popitem(last=False)
