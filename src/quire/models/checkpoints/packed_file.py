"""A file of packed weights: safetensors whose tensors are one model's buffers, in the order of loading."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quire.kernels.devices.memory import map_large_pages

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
