"""Packed weights kept on disk, so that a start that would quantize or unpack them again only reads them.

A file holds the buffers that one model's matrices were packed into, in the order of loading, and says which
matrix was stored how; a later start hands out the same buffers in the same order, and does not read the
matrices of the checkpoint. The name of a file is a digest of all that the buffers depend on: no file is ever
wrong, only unused.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quire.kernels.cpu.memory import ALIGNMENT, WeightMemory, map_large_pages
from quire.kernels.weights import Int4Weight, Int8Weight, Weight
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.safetensors import weight_files
from quire.models.weights import WeightSource

logger = logging.getLogger(__name__)

PACKING_VERSION = 1  # goes up with every change of the packed layout or of the numbers in it

AUTO = "auto"
MIN_PARAMETERS = 1_000_000_000  # of which packing takes a second or more

_SUFFIX = ".quireweights"
_UNFINISHED = ".tmp"
_ABANDONED = 3600  # seconds without a write after which an unfinished file's process must have died
_MAGIC = b"quire-w1"
_FOOTER = 16  # bytes: the magic, the length of the manifest, its CRC-32
_CHUNK = 64 << 20  # bytes read at once by one thread
_READERS = 4  # threads; more gain nothing where memory is what limits


class WeightCache:
    """A directory of packed weights. Several engines may use it at once.

    Args:
        directory: where the files are; made when the first is written.
        max_bytes: of all files together; those that were not used for longest go first.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes

    def open(self, checkpoint: Checkpoint, key: str) -> CachedWeights:
        """Return the weights of `checkpoint`, packed already if a file has them under `key` (`cache_key`)."""
        return CachedWeights(checkpoint, self, key)

    def read(self, key: str) -> tuple[dict[str, Any], torch.Tensor] | None:
        """Return the manifest and the bytes that were written under `key`.

        None if there are none, or they cannot be read or are damaged.
        """
        file = self._file(key)
        try:
            with file.open("rb") as opened:
                found = _read(opened.fileno())
            os.utime(file)  # the files that are not used are the oldest
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("packed weights in %s are not used and will be written anew: %s", file, error)
            return None
        return found

    def write(self, key: str, manifest: dict[str, Any], buffers: list[torch.Tensor]) -> None:
        """Write `buffers` under `key`; a disk that is full or read-only is no error."""
        num_bytes = sum(_aligned(buffer.nbytes) for buffer in buffers)
        if num_bytes > self._max_bytes:
            logger.info("packed weights of %d bytes are more than the cache may hold", num_bytes)
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room(num_bytes)
            with self._new_file(self._file(key)) as descriptor:
                _write(descriptor, manifest, buffers)
        except OSError as error:
            logger.warning("packed weights could not be kept in %s: %s", self._directory, error)

    def _file(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"

    @contextlib.contextmanager
    def _new_file(self, file: Path) -> Iterator[int]:
        """Give a new file's descriptor; it appears as `file` at once and whole, or not at all."""
        descriptor, name = tempfile.mkstemp(dir=self._directory, prefix=file.stem, suffix=_UNFINISHED)
        try:
            try:
                yield descriptor
                os.fsync(descriptor)  # else a crash of the system could leave a file of zeros under the name
            finally:
                os.close(descriptor)
            os.replace(name, file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest files until `num_bytes` more fit into the limit, and what was never finished."""
        for file in self._directory.glob(f"*{_UNFINISHED}"):
            if time.time() - file.stat().st_mtime > _ABANDONED:
                file.unlink(missing_ok=True)
        states = [(file, file.stat()) for file in self._directory.glob(f"*{_SUFFIX}")]
        states.sort(key=lambda state: state[1].st_mtime_ns)
        total = sum(state.st_size for _, state in states) + num_bytes
        for file, state in states:
            if total <= self._max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= state.st_size


class CachedWeights:
    """A checkpoint, and the memory that its matrices are packed into: `memory.is_filled` if they are already.

    Args:
        checkpoint: where what is not packed comes from.
        cache: where packed weights are kept.
        key: of this checkpoint and of how it is packed.
    """

    def __init__(self, checkpoint: Checkpoint, cache: WeightCache, key: str) -> None:
        self._checkpoint = checkpoint
        self._cache = cache
        self._key = key
        self._unpacked: dict[str, list[Any]] = {}  # forms of matrices that were read and are not released
        self._forms: dict[str, list[Any]] = {}  # of those that have gone into a buffer
        found = cache.read(key)
        if found is None:
            self.memory: WeightMemory = _RecordingMemory(self._note_packed)
        else:
            manifest, data = found
            self._forms = manifest["forms"]
            self.memory = FilledMemory(data, manifest["sizes"])

    def weight(self, source: WeightSource) -> Weight:
        """Return a matrix; if it is packed already, only its outline: tensors on torch's meta device."""
        if self.memory.is_filled and source.name in self._forms:
            return _outline(self._forms[source.name], source.shape)
        weight = self._checkpoint.weight(source)
        self._unpacked[source.name] = _form(weight)
        return weight

    def tensor(self, source: WeightSource) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._checkpoint.tensor(source)

    def release(self, source: WeightSource) -> None:
        """See `Checkpoint.release`."""
        self._unpacked.pop(source.name, None)
        self._checkpoint.release(source)

    def save(self) -> None:
        """Write what has been packed, once all is loaded. Does nothing if it came from the cache."""
        if isinstance(self.memory, _RecordingMemory):
            buffers = self.memory.buffers
            manifest = {"forms": self._forms, "sizes": [buffer.nbytes for buffer in buffers]}
            self._cache.write(self._key, manifest, buffers)

    def _note_packed(self) -> None:
        """A buffer is asked for: it is for the matrices that were read and are not released."""
        self._forms.update(self._unpacked)


class FilledMemory(WeightMemory):
    """Hands out the buffers that `data` is made of, one after the other.

    Args:
        data: [bytes] uint8, each buffer at a multiple of `ALIGNMENT`.
        sizes: bytes of each buffer.
    """

    def __init__(self, data: torch.Tensor, sizes: list[int]) -> None:
        super().__init__()
        self.is_filled = True
        self._data = data
        self._sizes = iter(sizes)
        self._start = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return the next buffer.

        Raises:
            ValueError: it is of another size; `PACKING_VERSION` did not go up with a change.
        """
        size = next(self._sizes, 0)
        if size != num_bytes:
            raise ValueError(f"cached weights have a buffer of {size} bytes where {num_bytes} are needed")
        start, self._start = self._start, self._start + _aligned(num_bytes)
        return self._data[start : start + num_bytes]


class _RecordingMemory(WeightMemory):
    """Remembers what it hands out, and tells of it."""

    def __init__(self, on_allocate: Callable[[], None]) -> None:
        super().__init__()
        self.buffers: list[torch.Tensor] = []
        self._on_allocate = on_allocate

    def allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = super().allocate(num_bytes)
        self.buffers.append(buffer)
        self._on_allocate()
        return buffer


def choose_cache(
    setting: str, *, max_bytes: int, is_quantized: bool, num_parameters: int
) -> WeightCache | None:
    """Return the cache that `EngineConfig.weight_cache` asks for.

    Left to choose ("auto"), it is used where it pays. For plain weights it would take their size on disk a
    second time, and save less than a second of CPU time for each GB.
    """
    if setting != AUTO:
        return WeightCache(Path(setting).expanduser(), max_bytes) if setting else None
    if not is_quantized or num_parameters < MIN_PARAMETERS:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return WeightCache(Path(base) / "quire" / "weights", max_bytes)


def cache_key(path: Path, **settings: Any) -> str:
    """Return what identifies the packed weights of the model at `path`.

    Args:
        path: the checkpoint's; see `Checkpoint`.
        settings: all else that the packed numbers depend on, such as dtype, quantization and instruction set.
    """
    gguf = find_gguf(path)
    files = [path / "config.json", *weight_files(path)] if gguf is None else [gguf]
    identity = {
        "files": [_identity(file.resolve()) for file in files],
        "version": (importlib.metadata.version("quire"), PACKING_VERSION),
        "torch": torch.__version__,
        **settings,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _identity(file: Path) -> list[Any]:
    state = file.stat()
    return [str(file), state.st_size, state.st_mtime_ns, state.st_ino]


def _form(weight: Weight) -> list[Any]:
    if isinstance(weight, Int8Weight):
        return ["int8"]
    if isinstance(weight, Int4Weight):
        return ["int4", weight.group_size]
    return ["float"]


def _outline(form: list[Any], shape: tuple[int, ...]) -> Weight:
    rows, inputs = shape
    if form[0] == "float":
        return torch.empty(shape, device="meta")
    values = torch.empty(shape, dtype=torch.uint8, device="meta")
    if form[0] == "int8":
        return Int8Weight(values, torch.empty(rows, device="meta"))
    scales = torch.empty(rows, inputs // form[1], device="meta")
    return Int4Weight(values, scales, scales)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write(descriptor: int, manifest: dict[str, Any], buffers: list[torch.Tensor]) -> None:
    """Write the buffers, the manifest and the footer; a file without footer is not complete."""
    with open(descriptor, "wb", closefd=False) as file:
        for buffer in buffers:
            file.write(buffer.numpy().data)
            file.write(bytes(_aligned(buffer.nbytes) - buffer.nbytes))
        text = json.dumps(manifest).encode()
        file.write(text)
        file.write(_MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little"))


def _read(descriptor: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return manifest and buffers; raise ValueError if the file is not whole."""
    size = os.fstat(descriptor).st_size
    footer = os.pread(descriptor, _FOOTER, max(size - _FOOTER, 0))
    if not footer.startswith(_MAGIC) or len(footer) < _FOOTER:
        raise ValueError("it has no footer")
    length = int.from_bytes(footer[8:12], "little")
    text = os.pread(descriptor, length, max(size - _FOOTER - length, 0))
    if zlib.crc32(text) != int.from_bytes(footer[12:16], "little"):
        raise ValueError("its manifest has another checksum")
    manifest: dict[str, Any] = json.loads(text)
    num_bytes = sum(map(_aligned, manifest["sizes"]))
    if num_bytes + length + _FOOTER != size:
        raise ValueError(f"it has {size} bytes; {num_bytes + length + _FOOTER} are needed")
    return manifest, _read_data(descriptor, num_bytes)


def _read_data(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Return the first `num_bytes` in large pages, which a mapped file would not have."""
    data = map_large_pages(num_bytes)[:num_bytes]
    view = data.numpy().data

    def read_chunk(start: int) -> None:
        stop = min(start + _CHUNK, num_bytes)
        while start < stop:
            count = os.preadv(descriptor, [view[start:stop]], start)
            if count == 0:
                raise ValueError("it became shorter while it was read")
            start += count

    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read_chunk, range(0, num_bytes, _CHUNK)))
    return data
