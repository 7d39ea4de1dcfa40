"""One prompt's KV in a file: its tokens, the identity of what computed it, and its blocks.

magic               8 bytes
bytes of header     4 bytes
header              JSON: identity, block size, bytes per block, token ids
checksum of header  16 bytes
padding             to a multiple of 4,096 bytes
blocks              one region each, see `quire.kv.tiers.disk.region`
state               behind the last block, one region for each piece, if layers are recurrent
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import KVFileError
from quire.kv.blocks.block_hash import BlockKey, SequenceKeys, root_digest
from quire.kv.blocks.state_pieces import piece_keys
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.region import FINGERPRINT_BYTES, RegionLayout

_MAGIC = b"quirekvf"
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 16
_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 1 << 28


class KVFile:
    """A file that `write_kv_file` has written, open for reading.

    Args:
        path: path of the file.

    Raises:
        KVFileError: it cannot be read, is of another kind, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            _require_regular(path)
            self._file = path.open("rb")
            header = self._read_header()
        except OSError as error:
            raise self._unreadable(error) from error
        self.identity: dict[str, str] = header["identity"]
        self.token_ids: list[int] = header["token_ids"]
        self.block_size: int = header["block_size"]
        self._layout = _layout(self.identity, self.block_size, header["bytes_per_block"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def require(self, identity: Mapping[str, str]) -> None:
        """Refuse KV with another identity.

        Raises:
            KVFileError: names each part of the identity that differs, with both values.
        """
        names = [*identity, *(name for name in self.identity if name not in identity)]
        differing = [
            f"{name} ({self.identity.get(name)} there, {identity.get(name)} here)"
            for name in names
            if self.identity.get(name) != identity.get(name)
        ]
        if differing:
            raise KVFileError(
                f"the KV in {self._path} does not belong to this engine; different: {', '.join(differing)}"
            )

    def read(self, index: int, key: BlockKey, into: ByteArray) -> None:
        """Read a block.

        Raises:
            KVFileError: it is damaged, or cannot be read.
        """
        layout = self._layout
        offset = self._start + index * layout.region_bytes
        raw = bytearray(layout.header_bytes)
        try:
            num_read = os.preadv(self._file.fileno(), [raw, into.data], offset)
        except OSError as error:
            raise self._unreadable(error) from error
        header = layout.parse(raw) if num_read == len(raw) + len(into) else None
        if header is None or header.key != key or not header.vouches_for(into):
            num_blocks = len(self.token_ids) // self.block_size
            what = f"block {index} of {num_blocks}" if index < num_blocks else "the state"
            raise KVFileError(f"{what} in {self._path} is damaged; the blocks before it have been restored")

    def _unreadable(self, error: OSError) -> KVFileError:
        return KVFileError(f"KV cannot be read from {self._path}: {error.strerror}")

    def _read_header(self) -> dict[str, Any]:
        prefix = self._file.read(len(_MAGIC) + _LENGTH_BYTES)
        size = int.from_bytes(prefix[len(_MAGIC) :], "little")
        if prefix[: len(_MAGIC)] != _MAGIC or size > _MAX_HEADER_BYTES:
            raise KVFileError(f"{self._path} holds no saved KV")
        header = self._file.read(size)
        if self._file.read(_CHECKSUM_BYTES) != _proof(header):
            raise KVFileError(f"the header of {self._path} is damaged")
        self._start = _aligned(len(prefix) + size + _CHECKSUM_BYTES)
        values: dict[str, Any] = json.loads(header)
        return values


def write_kv_file(
    path: Path,
    identity: Mapping[str, str],
    token_ids: list[int],
    *,
    block_size: int,
    bytes_per_block: int,
    num_pieces: int,
    read_block: Callable[[int, ByteArray], bool],
) -> bool:
    """Write the KV of all full blocks of a prompt to a file, which appears whole or not at all.

    The state behind them is written, too, if there are any.

    Args:
        path: path of the file; replaced if it exists.
        identity: what the KV was computed by, in named parts.
        token_ids: token ids of the prompt, whole blocks.
        block_size: tokens per block.
        bytes_per_block: bytes per block of keys and values.
        num_pieces: of a state; 0: there are none.
        read_block: reads the block or piece of a number; False: it is not there any more.

    Returns:
        False if a block was not there; nothing is written then.

    Raises:
        KVFileError: the file cannot be written.
    """
    header = json.dumps(
        {
            "identity": dict(identity),
            "block_size": block_size,
            "bytes_per_block": bytes_per_block,
            "token_ids": token_ids,
        }
    ).encode()
    start = _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header + _proof(header)
    layout = _layout(identity, block_size, bytes_per_block)
    keys = prompt_keys(token_ids, block_size, num_pieces=num_pieces)
    content = np.empty(bytes_per_block, dtype=np.uint8)
    unfinished: Path | None = None
    try:
        _require_regular(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            unfinished = Path(file.name)
            file.write(start.ljust(_aligned(len(start)), b"\0"))
            for index in range(len(keys)):
                if not read_block(index, content):
                    return False
                region = layout.header(keys[index], index + 1, content) + content.tobytes()
                file.write(region.ljust(layout.region_bytes, b"\0"))
        unfinished.replace(path)
    except OSError as error:
        raise KVFileError(f"KV cannot be written to {path}: {error.strerror}") from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
    return True


def prompt_keys(
    token_ids: list[int], block_size: int, cache_salt: str = "", *, num_pieces: int
) -> list[BlockKey]:
    """Return the keys of a prompt's full blocks, and of the pieces of the state behind them."""
    keys = SequenceKeys(root_digest(salt=cache_salt), block_size)
    keys.extend(np.array(token_ids, dtype=np.int32))
    blocks = [keys[index] for index in range(len(keys))]
    return blocks + (piece_keys(blocks[-1], num_pieces) if blocks else [])


def _require_regular(path: Path) -> None:
    """Refuse anything but a regular file: opening a pipe could block, and a device must not be replaced."""
    if path.exists() and not path.is_file():
        raise KVFileError(f"{path} is not a regular file")


def _layout(identity: Mapping[str, str], block_size: int, bytes_per_block: int) -> RegionLayout:
    described = json.dumps(dict(identity), sort_keys=True).encode()
    fingerprint = blake2b(described, digest_size=FINGERPRINT_BYTES).digest()
    return RegionLayout(fingerprint, block_size, bytes_per_block)


def _proof(header: bytes) -> bytes:
    return blake2b(header, digest_size=_CHECKSUM_BYTES).digest()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
