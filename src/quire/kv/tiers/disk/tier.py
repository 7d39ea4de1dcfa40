"""A tier on disk, which outlives the process: one file of regions, and an index of it in memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from typing_extensions import override

from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.region import FINGERPRINT_BYTES, RegionLayout
from quire.kv.tiers.disk.tier_file import SUFFIX, TierFile
from quire.kv.tiers.residents import ResidentBlocks
from quire.kv.tiers.tier import BlockTier

logger = logging.getLogger(__name__)


class DiskTier(BlockTier):
    """Keeps blocks in a file of the directory, whose name is the fingerprint of what computes them.

    The index is built from the regions' headers. Whatever happens to the file, a block is used only if its
    header is whole, names the very block that is wanted, and vouches for the payload. One process writes, any
    number of others read; when the writer ends, a reader takes its place. A region that a reader finds
    rewritten is a miss.

    Args:
        directory: may hold the files of several models.
        capacity_bytes: maximum size of all tiers' files in the directory together.
        layout: layout of the regions.
        min_uses: uses of a block after which it is stored.

    Raises:
        OSError: the file can be neither opened nor made.
    """

    def __init__(self, directory: Path, capacity_bytes: int, layout: RegionLayout, *, min_uses: int) -> None:
        num_places = capacity_bytes // layout.region_bytes
        super().__init__(ResidentBlocks(num_places, min_uses), layout.payload_bytes, layout.region_bytes)
        self._path = directory / f"{layout.fingerprint.hex()}{SUFFIX}"
        self._capacity_bytes = capacity_bytes
        self._layout = layout
        self._lock = threading.Lock()  # the layout belongs to the generation
        self._num_written = 0  # highest generation of a region
        self._is_disk_full = False  # as of the last refresh
        self._last_change = 0
        self._file: TierFile | None = TierFile(self._path)
        self._build_index(self._file)

    @property
    @override
    def is_writable(self) -> bool:
        file = self._file
        return file is not None and file.is_writer

    @override
    def read(self, key: BlockKey, into: ByteArray) -> bool:
        return self._is_there(key, lambda file, layout, place: file.read(layout, place, into), into)

    @override
    def prefetch(self, key: BlockKey) -> None:
        file, place = self._file, self.residents.place_of(key)
        if file is not None and place is not None:
            file.prefetch(self._layout, place)

    @override
    def check(self, key: BlockKey) -> None:
        self._is_there(key, TierFile.read_header)

    def _is_there(
        self,
        key: BlockKey,
        read: Callable[[TierFile, RegionLayout, int], bytes],
        payload: ByteArray | None = None,
    ) -> bool:
        """Return whether a block is in its place, by the header that `read` returns; forget it if it is not.

        With a `payload`, which `read` fills, the header must vouch for that, too.
        """
        file, layout, place = self._file, self._layout, self.residents.place_of(key)
        if file is None or place is None:
            return False
        try:
            header = layout.parse(read(file, layout, place))
        except OSError as error:
            logger.warning("KV could not be read from %s: %s", self._path, error)
            header = None
        if header is not None and header.key == key and (payload is None or header.vouches_for(payload)):
            return True
        self.residents.drop(key, place)
        return False

    @override
    def write(self, key: BlockKey, content: ByteArray, generation: int) -> bool:
        file = self._file
        with self._lock:
            layout = self._layout
            place = None
            if file is not None and file.is_writer and generation == self.residents.generation:
                place = self.residents.open_place(key, generation, may_grow=self._grow(file))
        if file is None or place is None:
            return False
        self._num_written += 1
        try:
            file.write(layout, place, layout.header(key, self._num_written, content), content)
        except OSError as error:
            logger.warning("KV could not be written to %s: %s", self._path, error)
            self._give_up(file, place, generation)
            return False
        self.residents.fill(key, place, generation)
        return True

    @override
    def refresh(self) -> None:
        """Check the file and its writer; a file that has vanished is created again."""
        file = self._file
        self._is_disk_full = False
        if file is None or not file.is_in_place():
            self._reopen()
        elif not file.is_writer and (file.try_to_become_writer() or file.last_change != self._last_change):
            self._build_index(file)

    @override
    def clear(self) -> None:
        """Forget everything stored so far, and hide what is stored from now on from other processes.

        The fingerprint names the weights of the files; those in use may have been replaced by others.
        """
        with self._lock:
            salted = self._layout.fingerprint + os.urandom(FINGERPRINT_BYTES)
            fingerprint = blake2b(salted, digest_size=FINGERPRINT_BYTES).digest()
            self._layout = replace(self._layout, fingerprint=fingerprint)
            self.residents.clear()

    @override
    def close(self) -> None:
        self.residents.clear()
        self._file = None

    def _reopen(self) -> None:
        self._file = None
        self.residents.replace([], 0)
        try:
            self._file = TierFile(self._path)
            self._build_index(self._file)
        except OSError as error:
            logger.warning("the KV tier cannot be used at present: %s", error)

    def _build_index(self, file: TierFile) -> None:
        layout = self._layout
        self._last_change = file.last_change
        if file.is_writer:
            file.truncate(self.residents.num_places * layout.region_bytes)
        # The last one may end before its padding, if the file was cut off and then written to.
        num_regions = min(-(-file.num_bytes // layout.region_bytes), self.residents.num_places)
        stored: list[tuple[int, BlockKey, int]] = []
        for place in range(num_regions):
            header = layout.parse(file.read_header(layout, place))
            if header is not None:
                stored.append((header.generation, header.key, place))
        stored.sort(key=lambda region: region[0], reverse=True)
        self._num_written = max(self._num_written, stored[0][0] if stored else 0)
        self.residents.replace([(key, place) for _, key, place in stored], num_regions)

    def _grow(self, file: TierFile) -> bool:
        """Return whether the file has room for one more region, if it needs one."""
        place = self.residents.next_new_place
        if place is None or self._is_disk_full:
            return False
        try:
            return file.grow((place + 1) * self._layout.region_bytes, self._capacity_bytes)
        except OSError as error:
            logger.warning("the KV tier does not grow: %s", error)
            return False

    def _give_up(self, file: TierFile, place: int, generation: int) -> None:
        """Free a region that could not be written; the file's last one is cut off, to give the disk back."""
        self._is_disk_full = True
        self.residents.free(place, generation)
        if place == self.residents.num_opened - 1:
            try:
                file.truncate(place * self._layout.region_bytes)
            except OSError as error:
                logger.warning("%s could not be shortened: %s", self._path, error)
                return
            self.residents.shrink(place)
