"""Time to load a model's weights, compared with reading its files: from the page cache, and from the disk.

Files are read in pieces of 64 MB, and loaded without a cache of packed weights, by turns; the best of each
counts. Between turns, the files' pages are dropped for the rows of the disk.

    python benchmarks/loading.py MODEL [--quantization none int8 int4] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.kernels.dispatch import kernel_set
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.gguf.location import find_gguf, parts_of
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.checkpoints.safetensors import weight_files

PIECE = 64 << 20  # bytes


def read(files: Sequence[Path]) -> None:
    """Read files from their start to their end."""
    buffer = bytearray(PIECE)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(files: Sequence[Path]) -> None:
    """Have the system forget the pages of files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes; what it returns is freed afterwards."""
    started = time.perf_counter()
    made = work()
    taken = time.perf_counter() - started
    del made
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model to load")
    parser.add_argument("--quantization", nargs="+", default=["none"], help="none, int8 or int4")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each physical core")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    options = parser.parse_args()
    path = resolve_model(options.model)
    gguf = find_gguf(path)
    files = list(weight_files(path)) if gguf is None else list(parts_of(gguf))
    config = read_model_config(path)
    kernel_set().use_threads(options.threads)
    print(f"{path}: {sum(file.stat().st_size for file in files) / 1e9:.2f} GB")
    print("| quantization | pages | read, s | load, s | ratio |\n|---|---|---|---|---|")
    for quantization in options.quantization:
        weights = WeightOptions(quantization=quantization)
        load = functools.partial(load_decoder, path, config, options=weights)
        load()
        for pages in ("in the page cache", "on the disk"):
            prepare = drop if pages == "on the disk" else read
            best = {"read": math.inf, "load": math.inf}
            for _ in range(options.rounds):
                for kind, work in (("read", lambda: read(files)), ("load", load)):
                    prepare(files)
                    best[kind] = min(best[kind], seconds(work))
            ratio = best["load"] / best["read"]
            print(f"| {quantization} | {pages} | {best['read']:.2f} | {best['load']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
