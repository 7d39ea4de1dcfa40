"""Memory of the prompt prefixes that each engine was sent."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

CHUNK = 512
"""Bytes of a prompt per chunk."""

MAX_CHUNKS = 256
"""Maximum number of chunks per prompt: 128 KiB."""

MAX_ENGINES_PER_CHUNK = 4
"""Maximum number of engines remembered per chunk: the last ones that computed it."""


def chunk_keys(prompt: bytes, salt: bytes = b"") -> list[int]:
    """Return a key for each full chunk of a prompt; it covers the whole prefix up to the chunk's end.

    Prompts with different salts have different keys: engines do not share their KV.

    Python's hash of bytes has a random key in each process, so that clients cannot choose prompts that
    collide. A collision only makes a choice worse.
    """
    keys: list[int] = []
    key = hash(salt)
    for start in range(0, min(len(prompt), MAX_CHUNKS * CHUNK) - CHUNK + 1, CHUNK):
        key = hash((key, prompt[start : start + CHUNK]))
        keys.append(key)
    return keys


class PrefixMemory:
    """Engines by prompt chunk; the least recently used chunks are forgotten first.

    Args:
        max_chunks: number of chunks to remember.
    """

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._engines: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def matched_bytes(self, keys: Sequence[int], engines: Collection[int]) -> dict[int, int]:
        """Return, for each of these engines, how many leading bytes of a prompt it has been sent before.

        Args:
            keys: keys of the prompt's chunks.
            engines: ids of the engines.
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
        for key in reversed(keys):  # a prefix is useful without its end, not vice versa
            others = [other for other in self._engines.pop(key, ()) if other != engine]
            self._engines[key] = (engine, *others[: MAX_ENGINES_PER_CHUNK - 1])
        while len(self._engines) > self._max_chunks:
            self._engines.popitem(last=False)


class ChunksInFlight:
    """The chunks of the prompts that one engine is working on."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def begin(self, keys: Sequence[int]) -> None:
        """Note that the engine has been sent a prompt with these chunks."""
        self._counts.update(keys)

    def end(self, keys: Sequence[int]) -> None:
        """Note that the engine has finished a prompt with these chunks."""
        for key in keys:
            if self._counts[key] == 1:
                del self._counts[key]
            else:
                self._counts[key] -= 1

    def matched_bytes(self, keys: Sequence[int]) -> int:
        """Return how many leading bytes of a prompt the engine is working on."""
        return CHUNK * sum(1 for _ in itertools.takewhile(self._counts.__contains__, keys))
