"""Host memory for blocks of one size, in places that are used again and again."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


class BlockMemory:
    """Numbered places in one mapping, which takes memory as places are used for the first time.

    An allocator would keep what threads free for these threads, and take memory for others beside it.

    Whoever takes a place holds it, and so does whoever reads it meanwhile: it is free when all have released
    it. Not thread-safe, but for reading and writing `blocks`.

    Args:
        num_places: at least one.
        bytes_per_block: of each.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_places: int, bytes_per_block: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, num_places * bytes_per_block, flags=flags)
        except OverflowError as error:
            raise OSError(f"{num_places * bytes_per_block} bytes are more than can be mapped") from error
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(num_places, -1)
        self._num_opened = 0  # places that have been taken at least once
        self._free: list[int] = []  # of those
        self._num_holders: dict[int, int] = {}  # of the others

    def take(self) -> int | None:
        """Return a free place, which is held until `release`; None if there is none."""
        if self._free:
            place = self._free.pop()
        elif self._num_opened < len(self.blocks):
            place = self._num_opened
            self._num_opened += 1
        else:
            return None
        self._num_holders[place] = 1
        return place

    def hold(self, place: int) -> None:
        """Hold a place that is held, until one more `release`."""
        self._num_holders[place] += 1

    def release(self, place: int) -> None:
        """End one `take` or `hold`."""
        self._num_holders[place] -= 1
        if not self._num_holders[place]:
            del self._num_holders[place]
            self._free.append(place)

    def close(self) -> None:
        """Take no memory any more, but for what somebody still reads or writes."""
        self.blocks = self.blocks[:0]
        self._num_opened = 0
        self._free.clear()
