"""The index of a tier: LRU eviction, and admission of blocks that are used often enough."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.kv.blocks.block_hash import BlockKey

_MIN_GHOSTS = 4096


@dataclasses.dataclass(slots=True)
class _Resident:
    key: BlockKey
    place: int
    last_use: int


class ResidentBlocks:
    """The index of a tier with numbered places for blocks. May be used by several threads.

    Only the ends of prefixes are evicted, so that every block can be reached: the one whose last use is
    longest ago goes first. Of blocks that are not here, as many as there are places leave a *ghost*: how
    often they were used. A block is worth storing once it was used `min_uses` times; one that was evicted is
    at its next use.

    `generation` counts how often everything was forgotten; a store or a load that began in another generation
    is void.

    Args:
        num_places: maximum number of blocks.
        min_uses: uses of a block after which it is worth storing.
    """

    def __init__(self, num_places: int, min_uses: int) -> None:
        self.generation = 0
        self.num_evicted = 0
        self._lock = threading.Lock()
        self._min_uses = min_uses
        self._num_places = num_places
        self._num_opened = 0  # places that have been given out at least once
        self._free: list[int] = []  # of those
        self._clock = 0
        self._residents: dict[bytes, _Resident] = {}
        self._num_children: dict[bytes, int] = {}  # residents by their parent's digest, where there are any
        self._ends: OrderedDict[bytes, None] = OrderedDict()  # those without children, in order of last use
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._residents)

    def place_of(self, key: BlockKey) -> int | None:
        """Return where a block is, or None."""
        with self._lock:
            found = self._residents.get(key.digest)
            return found.place if found is not None and found.key == key else None

    def count_leading(self, keys: Iterable[BlockKey]) -> int:
        """Return how many of `keys` are here, up to the first that is not."""
        num_found = 0
        with self._lock:
            for key in keys:
                found = self._residents.get(key.digest)
                if found is None or found.key != key:
                    break
                num_found += 1
        return num_found

    def use(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Count a use of blocks, given in the order of their prefix; return those to be stored now."""
        wanted = []
        with self._lock:
            self._clock += 1
            for key in keys:
                if key.digest in self._residents:
                    self._touch(key.digest)
                elif self._count_ghost(key.digest) >= self._min_uses:
                    wanted.append(key)
        return wanted

    def expect(self, keys: Iterable[BlockKey]) -> None:
        """Have blocks stored at their next use, however rarely they were used before."""
        with self._lock:
            for key in keys:
                if key.digest not in self._residents:
                    self._ghosts.pop(key.digest, None)
                    self._ghosts[key.digest] = self._min_uses - 1

    def _touch(self, digest: bytes) -> None:
        self._residents[digest].last_use = self._clock
        if digest in self._ends:
            self._ends.move_to_end(digest)

    def _count_ghost(self, digest: bytes) -> int:
        num_uses = self._ghosts.pop(digest, 0) + 1
        self._ghosts[digest] = num_uses
        while len(self._ghosts) > max(self._num_places, _MIN_GHOSTS):
            self._ghosts.popitem(last=False)
        return num_uses

    # -- places --------------------------------------------------------------------------------------------

    def open_place(self, key: BlockKey, generation: int, *, may_grow: bool = True) -> int | None:
        """Return a place to write a block to, which `fill` or `free` must follow.

        Args:
            key: key of the block.
            generation: in which the store began.
            may_grow: take a place that was never used before, rather than evict a block, if there is one.

        Returns:
            The place; None if the block is here already, if its parent is not, so that it could not be
            reached, if the generation is over, or if there is no room without evicting the parent.
        """
        with self._lock:
            if generation != self.generation or key.digest in self._residents:
                return None
            if key.parent in self._ghosts:
                return None
            if self._free:
                return self._free.pop()
            if may_grow and self._num_opened < self._num_places:
                self._num_opened += 1
                return self._num_opened - 1
            return self._evict(spared=key.parent)

    @property
    def next_new_place(self) -> int | None:
        """The place that the next store would take for the first time; None if it takes a used one."""
        with self._lock:
            return None if self._free or self._num_opened >= self._num_places else self._num_opened

    @property
    def num_places(self) -> int:
        """Maximum number of blocks."""
        return self._num_places

    @property
    def num_opened(self) -> int:
        """Number of places that were used at least once: all below this number."""
        return self._num_opened

    def fill(self, key: BlockKey, place: int, generation: int) -> None:
        """Note that a block is in a place from now on."""
        with self._lock:
            if generation != self.generation:
                return  # all places have been counted again
            if key.digest in self._residents:
                self._free.append(place)
            else:
                self._ghosts.pop(key.digest, None)
                self._insert(key, place)

    def free(self, place: int, generation: int) -> None:
        """Give a place back that holds nothing of use."""
        with self._lock:
            if generation == self.generation:
                self._free.append(place)

    def shrink(self, num_places: int) -> None:
        """Give up the free places from `num_places` on; they are opened again when there is room."""
        with self._lock:
            while self._num_opened > num_places and self._num_opened - 1 in self._free:
                self._num_opened -= 1
                self._free.remove(self._num_opened)

    def drop(self, key: BlockKey, place: int) -> None:
        """Forget a block that turned out not to be in its place."""
        with self._lock:
            found = self._residents.get(key.digest)
            if found is not None and found.place == place:
                self._remove(found)
                self._free.append(place)

    def clear(self) -> None:
        """Forget everything and begin a new generation; all places are free."""
        with self._lock:
            self.generation += 1
            self._ghosts.clear()
            self._fill([], self._num_opened)

    def replace(self, stored: Sequence[tuple[BlockKey, int]], num_opened: int) -> None:
        """Replace the index by what was found on disk; no store may be under way.

        Args:
            stored: blocks and their places, the most recently stored first; of two equal blocks the first
                counts.
            num_opened: places below this number that are not in `stored` are free.
        """
        with self._lock:
            self._fill(stored, num_opened)

    def _fill(self, stored: Sequence[tuple[BlockKey, int]], num_opened: int) -> None:
        self._residents.clear()
        self._num_children.clear()
        self._ends.clear()
        self._num_opened = num_opened
        for key, place in _in_order_of_use(stored):
            self._insert(key, place)
        used = {resident.place for resident in self._residents.values()}
        self._free = [place for place in range(num_opened) if place not in used]

    def _insert(self, key: BlockKey, place: int) -> None:
        self._clock += 1
        self._residents[key.digest] = _Resident(key, place, self._clock)
        self._num_children[key.parent] = self._num_children.get(key.parent, 0) + 1
        self._ends.pop(key.parent, None)
        if key.digest not in self._num_children:  # children of a block that comes back may still be here
            self._ends[key.digest] = None

    def _remove(self, resident: _Resident) -> None:
        """Take a block out; its parent is the new end of the prefix if no other block follows it."""
        digest, parent = resident.key.digest, resident.key.parent
        del self._residents[digest]
        self._ends.pop(digest, None)
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return
        del self._num_children[parent]
        if parent in self._residents:
            self._ends[parent] = None
            oldest = self._residents[next(iter(self._ends))]
            if self._residents[parent].last_use <= oldest.last_use:
                self._ends.move_to_end(parent, last=False)

    def _evict(self, spared: bytes) -> int | None:
        """Evict the block whose place is to be used for another, but not `spared`, its parent."""
        digest = next((digest for digest in self._ends if digest != spared), None)
        if digest is None:
            return None
        evicted = self._residents[digest]
        self._remove(evicted)
        self._ghosts[digest] = self._min_uses - 1  # its next use brings it back
        self.num_evicted += 1
        return evicted.place


def _in_order_of_use(stored: Sequence[tuple[BlockKey, int]]) -> list[tuple[BlockKey, int]]:
    """Return blocks given from the last stored to the first in the order in which they count as last used.

    A block counts as used whenever one that follows it in a prefix was.
    """
    by_digest: dict[bytes, tuple[BlockKey, int]] = {}
    for key, place in stored:
        by_digest.setdefault(key.digest, (key, place))
    ordered: list[tuple[BlockKey, int]] = []
    placed: set[bytes] = set()
    for digest in by_digest:
        current, branch = digest, []
        while current in by_digest and current not in placed:
            placed.add(current)
            branch.append(by_digest[current])
            current = by_digest[current][0].parent
        ordered += branch
    return ordered[::-1]
