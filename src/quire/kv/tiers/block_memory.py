"""Host memory for blocks of one size, in places that are used again and again."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


class BlockMemory:
    """Numbered places in one mapping, which takes memory as places are used for the first time.

    An allocator would keep what threads free for these threads, and take memory for others beside it.

    Whoever reads a place holds it: if it is given back meanwhile, it is free when nobody holds it. Not
    thread-safe, but for reading and writing `blocks`.

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
        self._num_holders: dict[int, int] = {}  # of places that are held
        self._given_back: set[int] = set()  # while they are held

    def take(self) -> int | None:
        """Return a free place, or None."""
        if self._free:
            return self._free.pop()
        if self._num_opened == len(self.blocks):
            return None
        self._num_opened += 1
        return self._num_opened - 1

    def give_back(self, place: int) -> None:
        """Let a place be free."""
        if place in self._num_holders:
            self._given_back.add(place)
        else:
            self._free.append(place)

    def hold(self, place: int) -> None:
        """Keep the content of a place that is taken until `release`."""
        self._num_holders[place] = self._num_holders.get(place, 0) + 1

    def release(self, place: int) -> None:
        """End one `hold`."""
        self._num_holders[place] -= 1
        if not self._num_holders[place]:
            del self._num_holders[place]
            if place in self._given_back:
                self._given_back.remove(place)
                self._free.append(place)

    def close(self) -> None:
        """Take no memory any more, but for what somebody still reads or writes."""
        self.blocks = self.blocks[:0]
        self._num_opened = 0
        self._free.clear()
