"""What a KV tier gains after a restart, how fast it reads, and what it costs if it never hits.

The model has Qwen3-0.6B's shape and random weights.

- Time to the first token of a prompt: computed, and loaded by a new engine from the disk tier that the last
  one has left behind, with the file in the page cache and not. Both answers must be equal. The first prompt
  of each engine is another one, so that neither pays for warming up.
- Reading: the blocks of the prompt are loaded into a cache, checks included, and `dd` reads the same file in
  pieces of the same size; once with the file in the page cache, once without. Then with memory in front of
  the disk (`kv_tier_memory_size`) that holds all of them.
- Overhead: prompts that share nothing, with a tier that stores what is used twice, one that stores everything
  at once, and twice without, which shows the noise; each round begins with another.

    python benchmarks/kv_tiers.py [--prompt-len 1500] [--requests 8] [--rounds 3] [--model DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_model import random_model

from quire import LLM
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.cached_tier import CachedTier
from quire.kv.tiers.connector import TierConnector, TierMetadata
from quire.kv.tiers.disk.region import RegionLayout
from quire.kv.tiers.disk.tier import DiskTier
from quire.kv.tiers.loads import BlockLoad
from quire.kv.tiers.tier import BlockTier
from quire.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
BLOCK_SIZE = 16
BLOCK_BYTES = 28 * 2 * 8 * 128 * 2 * BLOCK_SIZE  # of Qwen3-0.6B in bfloat16


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def open_llm(model: str, directory: str = "", **options: Any) -> LLM:
    """Return an engine, with a disk tier if a directory is given."""
    if directory:
        options = {"kv_tier": "disk", "kv_tier_path": directory, "kv_tier_min_uses": 1, **options}
    return LLM(model, dtype="bfloat16", block_size=BLOCK_SIZE, num_kv_blocks=512, **options)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return the seconds to a prompt's first token, the token, and how many tokens were not computed."""
    started = time.perf_counter()
    [output] = llm.generate([prompt], ONE_TOKEN)
    return time.perf_counter() - started, output.outputs[0].token_ids, output.num_cached_tokens


def drop_from_page_cache(directory: str) -> None:
    """Write a directory's files to disk and forget them."""
    for file in Path(directory).iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_restart(model: str, directory: str, prompt: list[int], rounds: int) -> dict[str, Any]:
    """Return seconds to the first token, by how it was had."""
    warm_up = prompt_of(64, seed=99)
    with open_llm(model, directory) as llm:
        first_token(llm, warm_up)
        _, expected, _ = first_token(llm, prompt)
    seconds: dict[str, list[float]] = {"computed": [], "loaded": [], "loaded, cold": []}
    for _ in range(rounds):
        for name, values in seconds.items():
            if name == "loaded, cold":
                drop_from_page_cache(directory)
            with open_llm(model, "" if name == "computed" else directory) as llm:
                if name != "loaded, cold":
                    first_token(llm, warm_up)
                elapsed, token, num_cached = first_token(llm, prompt)
            assert token == expected, "the tier changed the answer"
            assert (num_cached > 0) == (name != "computed")
            values.append(elapsed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "share": medians["loaded"] / medians["computed"]}


def measure_reading(directory: str, num_blocks: int, rounds: int) -> dict[str, float]:
    """Return bytes per second of the tier and of dd, by where the blocks are."""
    layout = RegionLayout(b"benchmark tier  ", BLOCK_SIZE, BLOCK_BYTES)
    tier = DiskTier(Path(directory), 2 * num_blocks * layout.region_bytes, layout, min_uses=1)
    keys = SequenceKeys(root_digest(), BLOCK_SIZE)
    keys.extend(np.arange(num_blocks * BLOCK_SIZE, dtype=np.int32))
    content = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    for index in range(num_blocks):
        assert tier.write(keys[index], content, tier.residents.generation)
    [file] = Path(directory).glob(f"{layout.fingerprint.hex()}*")
    dd = ["dd", f"if={file}", "of=/dev/null", f"bs={layout.region_bytes}"]
    all_keys = [keys[index] for index in range(num_blocks)]
    cached = CachedTier(tier, num_blocks * BLOCK_BYTES)
    read_all(cached, all_keys)
    names = "tier, cold", "dd, cold", "tier", "dd", "tier, in memory"
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, values in seconds.items():
            if name.endswith("cold"):
                drop_from_page_cache(directory)
            if name.startswith("tier"):
                values.append(read_all(cached if name.endswith("memory") else tier, all_keys))
            else:
                started = time.perf_counter()
                subprocess.run(dd, check=True, stderr=subprocess.DEVNULL)
                values.append(time.perf_counter() - started)
    tier.close()
    num_bytes = num_blocks * layout.region_bytes
    return {name: num_bytes / statistics.median(values) for name, values in seconds.items()}


class ArrayCache:
    """A KV cache that is nothing but memory."""

    def __init__(self, num_blocks: int) -> None:
        self.bytes_per_block = BLOCK_BYTES
        self._blocks = np.ones((num_blocks, BLOCK_BYTES), dtype=np.uint8)

    def read_block(self, block_id: int, into: ByteArray) -> None:
        """See `BlockStore`."""
        np.copyto(into, self._blocks[block_id])

    def write_block(self, block_id: int, content: ByteArray) -> None:
        """See `BlockStore`."""
        np.copyto(self._blocks[block_id], content)


def read_all(tier: BlockTier, keys: list[Any]) -> float:
    """Return the seconds that a connector takes to load blocks into a cache, checks included."""
    connector = TierConnector(BLOCK_SIZE, lambda _: tier)
    connector.register_kv_caches([ArrayCache(len(keys))])
    blocks = [(key, (number,)) for number, key in enumerate(keys)]
    started = time.perf_counter()
    load = BlockLoad("all", blocks, tier.residents.generation)
    connector.start_load_kv(TierMetadata(load.generation, 0, [], [load], []))
    while not connector.get_finished(())[1]:
        time.sleep(0.001)
    seconds = time.perf_counter() - started
    assert connector.stats().num_loaded_blocks == len(keys)
    connector._readers.close(60)
    return seconds


def measure_overhead(model: str, directory: str, num_requests: int, rounds: int) -> dict[str, list[float]]:
    """Return medians of seconds and of CPU seconds for prompts that share nothing, by what the tier does."""
    engines = {
        "no tier": open_llm(model),
        "never hits": open_llm(model, f"{directory}/a", kv_tier_min_uses=2),
        "never hits, stores all": open_llm(model, f"{directory}/b"),
        "no tier again": open_llm(model),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    order = list(engines)
    for number in range(rounds + 1):
        prompts = [prompt_of(512, seed=1000 * number + each) for each in range(num_requests)]
        for name in order:
            started, cpu_started = time.perf_counter(), time.process_time()
            engines[name].generate(prompts, params)
            if number:  # the first warms up
                taken[name].append((time.perf_counter() - started, time.process_time() - cpu_started))
        order = [*order[1:], order[0]]
    for llm in engines.values():
        llm.shutdown()
    return {
        name: [statistics.median(one) for one in zip(*pairs, strict=True)] for name, pairs in taken.items()
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="directory of the model; made if not given")
    parser.add_argument("--directory", help="where the tiers are; a file system on the disk to measure")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with (
        random_model(arguments.model) as model,
        tempfile.TemporaryDirectory(dir=arguments.directory) as name,
    ):
        tiers = Path(name)
        (tiers / "reading").mkdir()
        num_blocks = arguments.prompt_len // BLOCK_SIZE
        prompt = prompt_of(arguments.prompt_len, seed=0)
        figures = {
            "restart": measure_restart(model, str(tiers / "restart"), prompt, arguments.rounds),
            "reading": measure_reading(str(tiers / "reading"), num_blocks, arguments.rounds),
            "overhead": measure_overhead(model, str(tiers), arguments.requests, arguments.rounds),
        }
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))


def report(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    restart, reading, overhead = figures["restart"], figures["reading"], figures["overhead"]
    lines = ["time to the first token, s"]
    lines += [f"  {name:24}{seconds:8.3f}" for name, seconds in restart["seconds"].items()]
    lines += [f"  {'loaded / computed':24}{restart['share']:8.3f}", "reading, GB/s"]
    lines += [f"  {name:24}{speed / 1e9:8.2f}" for name, speed in reading.items()]
    lines += [f"  {'tier / dd, cold':24}{reading['tier, cold'] / reading['dd, cold']:8.2f}"]
    lines += ["prompts that share nothing, s, and s of CPU time"]
    lines += [f"  {name:24}{seconds:8.2f}{cpu:8.2f}" for name, (seconds, cpu) in overhead.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
