"""The on-disk format of a block: a region of fixed size with a header and checksums.

    magic                     8 bytes
    generation                8 bytes, grows with every region that is written to the file
    fingerprint              16 bytes, of what the KV was computed by
    digest, parent           16 bytes each, the block's chained key and its parent's
    checksum of the payload  16 bytes
    bytes of tokens           4 bytes
    bytes of payload          4 bytes
    tokens                   4 bytes each
    checksum of all above    16 bytes
    padding                  to a multiple of 512 bytes
    payload                  keys and values of all layers, as they lie in the cache
    padding                  to a multiple of 4,096 bytes

The header proves itself, so that an index can be built from headers alone; with its checksum it also vouches
for the payload.
"""

from __future__ import annotations

import dataclasses
import struct
from hashlib import blake2b

from quire.kv.blocks.block_hash import TOKEN_BYTES, BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.checksum import CHECKSUM_BYTES, checksum

FINGERPRINT_BYTES = 16

_MAGIC = b"quirekv1"
_FIXED = struct.Struct("<8sQ16s16s16s16sII")
_HEADER_ALIGNMENT = 512
_REGION_ALIGNMENT = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The header of a region."""

    key: BlockKey
    generation: int
    payload_checksum: bytes

    def vouches_for(self, payload: ByteArray) -> bool:
        """Return whether a payload is the one that was written with this header."""
        return checksum(payload) == self.payload_checksum


@dataclasses.dataclass(frozen=True, slots=True)
class RegionLayout:
    """The sizes of all regions of one file, in bytes, and what they must have been computed by.

    Args:
        fingerprint: `FINGERPRINT_BYTES` that stand for model, weights and all else that the KV depends on.
        block_size: tokens per block.
        payload_bytes: keys and values of one block.
    """

    fingerprint: bytes
    block_size: int
    payload_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        size = _FIXED.size + self.block_size * TOKEN_BYTES + CHECKSUM_BYTES
        return -(-size // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT

    @property
    def region_bytes(self) -> int:
        """Bytes from the start of one region to that of the next."""
        size = self.header_bytes + self.payload_bytes
        return -(-size // _REGION_ALIGNMENT) * _REGION_ALIGNMENT

    def header(self, key: BlockKey, generation: int, payload: ByteArray) -> bytes:
        """Return the header of a block that is to be written, `header_bytes` long."""
        fixed = _FIXED.pack(
            _MAGIC,
            generation,
            self.fingerprint,
            key.digest,
            key.parent,
            checksum(payload),
            len(key.tokens),
            len(payload),
        )
        described = fixed + key.tokens
        return (described + _proof(described)).ljust(self.header_bytes, b"\0")

    def parse(self, header: bytes | bytearray) -> Header | None:
        """Return what a header says; None if it is damaged, cut off, or not of a region of this layout."""
        if len(header) < self.header_bytes:
            return None
        end = _FIXED.size + self.block_size * TOKEN_BYTES
        described = bytes(header[:end])
        magic, generation, fingerprint, digest, parent, payload_checksum, num_tokens, num_payload = (
            _FIXED.unpack_from(described)
        )
        expected = (_MAGIC, self.fingerprint, self.block_size * TOKEN_BYTES, self.payload_bytes)
        if (magic, fingerprint, num_tokens, num_payload) != expected:
            return None
        if bytes(header[end : end + CHECKSUM_BYTES]) != _proof(described):
            return None
        return Header(BlockKey(digest, parent, described[_FIXED.size :]), generation, payload_checksum)


def _proof(described: bytes) -> bytes:
    return blake2b(described, digest_size=CHECKSUM_BYTES).digest()
