"""What it costs `quire route` to know what engines have cached: for each prompt, and for each block.

A prompt is looked up for engines that have cached none of it, which takes longest. Printed are the time until
the answer, the CPU time of the process, and the longest time for which the event loop did nothing else.

    python benchmarks/prefix_finder.py [--model mini] [--engines 4] [--rounds 50]
"""

import argparse
import asyncio
import json
import os
import statistics
import time
import tracemalloc

from quire.cluster.prefixes.block_index import EngineBlocks
from quire.cluster.prefixes.finder import PrefixFinder
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizers.reading import read_tokenizer

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of 7. "
SIZES = (1_000, 4_000, 16_000, 64_000, 256_000)  # characters
BLOCKS = 262_144
TICK = 0.0005  # seconds


async def longest_pause(until: asyncio.Event) -> float:
    """Return by how many seconds the event loop was late at most."""
    latest = 0.0
    while not until.is_set():
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        latest = max(latest, time.perf_counter() - due)
    return latest


async def measure_prompts(model: str, num_engines: int, rounds: int) -> None:
    """Print a line for each length of a prompt."""
    lookup = PrefixFinder(read_tokenizer(resolve_model(model, weights=False)), 60.0)
    engines = [EngineBlocks(16) for _ in range(num_engines)]
    for size in SIZES:
        prompt = (TEXT * (size // len(TEXT) + 1))[:size]
        body = json.dumps({"model": model, "prompt": prompt}).encode()
        seconds, pauses = [], []
        cpu = time.process_time()
        for _ in range(rounds):
            done = asyncio.Event()
            pause = asyncio.create_task(longest_pause(done))
            await asyncio.sleep(0)
            start = time.perf_counter()
            found = await lookup.find("/v1/completions", body, size, engines)
            seconds.append(time.perf_counter() - start)
            done.set()
            pauses.append(await pause)
        assert found is not None
        times = f"{1e3 * statistics.median(seconds):.2f} ms (best {1e3 * min(seconds):.2f})"
        cpu = 1e3 * (time.process_time() - cpu) / rounds
        print(
            f"{size:7} characters, {len(found.digests[16]):5} blocks: {times}, CPU {cpu:.2f} ms, "
            f"event loop late by {1e3 * statistics.median(pauses):.2f} ms"
        )
    lookup.close()


def measure_blocks() -> None:
    """Print what a known block costs."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    blocks = EngineBlocks(16)
    blocks.add(os.urandom(16) for _ in range(BLOCKS))
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    digests = [os.urandom(16) for _ in range(BLOCKS)]
    start = time.perf_counter()
    blocks.add(digests)
    added = time.perf_counter()
    blocks.remove(digests)
    removed = time.perf_counter()
    print(
        f"a block: {num_bytes / BLOCKS:.0f} bytes, {1e6 * (added - start) / BLOCKS:.2f} us to add, "
        f"{1e6 * (removed - added) / BLOCKS:.2f} us to remove"
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="mini")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    asyncio.run(measure_prompts(options.model, options.engines, options.rounds))
    measure_blocks()


if __name__ == "__main__":
    main()
