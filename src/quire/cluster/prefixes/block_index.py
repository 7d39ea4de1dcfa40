"""The cached blocks of engines, known from their KV events, by the ends of their digests (`HASH_BYTES`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class EngineBlocks:
    """The blocks that one engine has cached, by their digests, the least recently used first.

    Args:
        block_size: tokens per block.
        tokenizer: fingerprint of the engine's tokenizer.
    """

    def __init__(self, block_size: int, tokenizer: str) -> None:
        self.block_size = block_size
        self.tokenizer = tokenizer
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digests: Iterable[bytes]) -> None:
        """Note that the engine has cached these blocks."""
        for digest in digests:
            self._digests[digest] = None
            self._digests.move_to_end(digest)

    def remove(self, digests: Iterable[bytes]) -> None:
        """Note that the engine has evicted these blocks."""
        for digest in digests:
            self._digests.pop(digest, None)

    def clear(self) -> None:
        """Forget all blocks."""
        self._digests.clear()

    def num_cached(self, digests: Sequence[bytes]) -> int:
        """Return how many of a prompt's blocks the engine has cached, up to the last one known.

        Engines evict the end of a prompt before its beginning. Unknown blocks before a known one were cached
        before the engine's events were followed, or forgotten for lack of room.

        Args:
            digests: digests of the prompt's full blocks, in order.
        """
        known = self._digests
        for number in range(len(digests), 0, -1):
            if digests[number - 1] in known:
                return number
        return 0

    def use(self, digests: Sequence[bytes]) -> None:
        """Note that a prompt with these blocks is sent to the engine; its first blocks are forgotten last."""
        for digest in reversed(digests):
            if digest in self._digests:
                self._digests.move_to_end(digest)

    def forget_oldest(self) -> None:
        """Forget the least recently used block."""
        self._digests.popitem(last=False)


class BlockIndex:
    """The blocks of all engines whose KV events are followed.

    Args:
        max_blocks: maximum number of blocks, summed over engines.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._engines: list[EngineBlocks] = []

    def open(self, block_size: int, tokenizer: str) -> EngineBlocks:
        """Return an empty table for the blocks of one engine."""
        blocks = EngineBlocks(block_size, tokenizer)
        self._engines.append(blocks)
        return blocks

    def close(self, blocks: EngineBlocks) -> None:
        """Drop an engine's table."""
        self._engines.remove(blocks)

    def trim(self) -> None:
        """Forget blocks above the limit, from the engine with the most blocks."""
        for _ in range(sum(map(len, self._engines)) - self._max_blocks):
            max(self._engines, key=len).forget_oldest()
