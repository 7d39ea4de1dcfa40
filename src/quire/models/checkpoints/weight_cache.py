"""A disk cache of packed weights, so that later starts need not quantize or unpack them again.

A file's name is a digest of all that its buffers depend on: no file is ever wrong, only unused.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import logging
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quire import __version__
from quire.kernels.devices.memory import map_large_pages
from quire.models.checkpoints.gguf.location import find_gguf, parts_of
from quire.models.checkpoints.safetensors import weight_files

logger = logging.getLogger(__name__)

PACKING_VERSION = 11  # goes up with every change of the packed layout or of the numbers in it

AUTO = "auto"
MIN_PARAMETERS = 1_000_000_000  # packing them takes a second or more

_SUFFIX = ".packed.safetensors"
_UNFINISHED = f"{_SUFFIX}.tmp"
_OLD_SUFFIX = ".quireweights"  # of another format that no start reads any more
_ABANDONED = 3600  # seconds without a write after which an unfinished file's process must have died


class WeightCache:
    """A directory of packed weights. Several engines may use it at once.

    Args:
        directory: where the files are; made when the first is written.
        max_bytes: maximum bytes of all files together; those that were not used for longest go first.
        is_for_all: whether it is for weights, too, that are packed as quickly as they are read.
    """

    def __init__(self, directory: Path, max_bytes: int, *, is_for_all: bool = True) -> None:
        self.is_for_all = is_for_all
        self._directory = directory
        self._max_bytes = max_bytes

    def read(self, key: str) -> tuple[dict[str, list[Any]], list[torch.Tensor]] | None:
        """Return the forms and the buffers that were written under `key`.

        None if there are none, or they cannot be read or are damaged.
        """
        file = self._file(key)
        try:
            found = read_packed(file)
            os.utime(file)  # the files that are not used are the oldest
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("packed weights in %s are ignored, and will be rewritten: %s", file, error)
            return None
        return found

    def write(self, key: str, forms: dict[str, list[Any]], buffers: list[torch.Tensor]) -> None:
        """Write `buffers` under `key`, at once and whole; a disk that is full or read-only is no error."""
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        if num_bytes > self._max_bytes:
            logger.info("packed weights of %d bytes are more than the cache may hold", num_bytes)
            return
        unfinished: Path | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room(num_bytes)
            descriptor, name = tempfile.mkstemp(dir=self._directory, prefix=key, suffix=_UNFINISHED)
            os.close(descriptor)
            unfinished = Path(name)
            write_packed(unfinished, forms, buffers)
            unfinished.replace(self._file(key))
        except OSError as error:
            logger.warning("packed weights could not be kept in %s: %s", self._directory, error)
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"

    def _make_room(self, num_bytes: int) -> None:
        """Remove what no start will read, and the oldest files until `num_bytes` more fit into the limit."""
        for file in self._directory.glob(f"*{_OLD_SUFFIX}"):
            file.unlink(missing_ok=True)
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


def choose_cache(setting: str, *, max_bytes: int, num_parameters: int) -> WeightCache | None:
    """Return the cache that `EngineConfig.weight_cache` asks for.

    Left to choose ("auto"), it is used where it pays. Weights that are packed as quickly as they are read
    would take their size on disk a second time, and the first start would write them.
    """
    if setting != AUTO:
        return WeightCache(Path(setting).expanduser(), max_bytes) if setting else None
    if num_parameters < MIN_PARAMETERS:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return WeightCache(Path(base) / "quire" / "weights", max_bytes, is_for_all=False)


def cache_key(path: Path, **settings: Any) -> str:
    """Return what identifies the packed weights of the model at `path`.

    Args:
        path: the checkpoint's; see `Checkpoint`.
        settings: all else that the packed numbers depend on, such as dtype, quantization and instruction set.
    """
    gguf = find_gguf(path)
    files = [path / "config.json", *weight_files(path)] if gguf is None else parts_of(gguf)
    identity = {
        "files": [_identity(file.resolve()) for file in files],
        "version": (__version__, PACKING_VERSION),
        "torch": torch.__version__,
        **settings,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _identity(file: Path) -> list[Any]:
    state = file.stat()
    return [str(file), state.st_size, state.st_mtime_ns, state.st_ino]


_CHUNK = 64 << 20  # bytes read at once by one thread
_READERS = 4  # threads; more gain nothing where memory is what limits


def write_packed(file: Path, forms: dict[str, list[Any]], buffers: list[torch.Tensor]) -> None:
    """Write buffers ([bytes] uint8, whole cache lines) and how the matrices in them were stored, by name.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {f"{number:08}": buffer.numpy() for number, buffer in enumerate(buffers)}
    manifest = [forms, _checksum(forms, [buffer.nbytes for buffer in buffers])]
    try:
        save_file(tensors, file, {"manifest": json.dumps(manifest)})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with file.open("rb") as written:
        os.fsync(written.fileno())  # else a crash of the system could leave a file of zeros


def read_packed(file: Path) -> tuple[dict[str, list[Any]], list[torch.Tensor]]:
    """Return the forms and the buffers of `write_packed`, each buffer aligned to a cache line.

    Raises:
        ValueError: the file is damaged, not complete, or holds something else.
        OSError: it cannot be read.
    """
    try:
        with safe_open(file, framework="numpy") as opened:  # refuses holes and missing bytes
            metadata = opened.metadata() or {}
            sizes = [opened.get_slice(name).get_shape()[0] for name in sorted(opened.keys())]
        forms, checksum = json.loads(metadata.get("manifest", "[{}, 0]"))
    except (SafetensorError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if checksum != _checksum(forms, sizes):
        raise ValueError("its checksum is missing or wrong")
    data = _read_last(file, sum(sizes))
    starts = itertools.accumulate(sizes, initial=0)
    return forms, [data[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _checksum(forms: dict[str, list[Any]], sizes: list[int]) -> int:
    return zlib.crc32(json.dumps([forms, sizes]).encode())


def _read_last(file: Path, num_bytes: int) -> torch.Tensor:
    """Return the last `num_bytes` of a file in large pages, which a mapped file would not have."""
    if num_bytes > file.stat().st_size:
        raise ValueError(f"it is shorter than the {num_bytes} bytes that it promises")
    data = map_large_pages(num_bytes)[:num_bytes]
    view = data.numpy().data

    def read_chunk(start: int) -> None:
        stop = min(start + _CHUNK, num_bytes)
        while start < stop:
            count = os.preadv(descriptor, [view[start:stop]], offset + start)
            if count == 0:
                raise ValueError("it became shorter while it was read")
            start += count

    with file.open("rb") as opened, concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        descriptor = opened.fileno()
        offset = os.fstat(descriptor).st_size - num_bytes
        list(readers.map(read_chunk, range(0, num_bytes, _CHUNK)))
    return data
