"""Prompt prefixes that the router has sent to each engine."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

CHUNK = 512
"""Bytes of a prompt per chunk."""

MAX_CHUNKS = 256
"""Chunks of one prompt that are looked at: 128 KiB."""

MAX_ENGINES_PER_CHUNK = 4
"""Engines that are remembered for a chunk: those that computed it last."""


def chunk_keys(prompt: bytes, salt: bytes = b"") -> list[int]:
    """Return a key for each full chunk of a prompt, which stands for all that comes before it too.

    Prompts with different salts have different keys: engines do not share their KV.

    Python's hash of bytes is keyed afresh in each process, so that no client can choose prompts that collide.
    A collision costs nothing but a worse choice.
    """
    keys: list[int] = []
    key = hash(salt)
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


class ChunksInFlight:
    """The chunks of the prompts that one engine is working on."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def begin(self, keys: Sequence[int]) -> None:
        """Note that the engine has been sent a prompt with these chunks."""
        self._counts.update(keys)

    def end(self, keys: Sequence[int]) -> None:
        """Note that the engine is done with it."""
        for key in keys:
            if self._counts[key] == 1:
                del self._counts[key]
            else:
                self._counts[key] -= 1

    def matched_bytes(self, keys: Sequence[int]) -> int:
        """Return how many bytes of a prompt's beginning the engine is working on."""
        return CHUNK * sum(1 for _ in itertools.takewhile(self._counts.__contains__, keys))
