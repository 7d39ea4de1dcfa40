"""Kill engines while they write their KV tier, damage its file, and compare every answer of the next ones.

PYTHONPATH=tests/support python tests/kv/tier_soak.py --kills 200

Each engine runs in a process of its own and answers prompts until it is killed (-9) at a random moment. Then
bits of the file are flipped, pages exchanged, or its end is cut off. Every answer must be that of an engine
without a tier, and the directory must stay within its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK_BYTES = 36_864  # a region of the built-in model
CAPACITY_GB = 60 * BLOCK_BYTES / 1e9
LONGEST_LIFE = 0.6  # seconds from the first answer on


def prompts() -> list[list[int]]:
    """Return prompts of up to 20 blocks that share prefixes: more than the tier holds."""
    rng = random.Random(0)
    stems = [[rng.randrange(300, 1500) for _ in range(160)] for _ in range(4)]
    return [stem[: 16 * rng.randrange(1, 11)] + rng.choices(range(300, 1500), k=163) for stem in stems * 3]


def answers(seed: int, **options):
    """Yield (number of the prompt, its greedy continuation), in random order, for ever."""
    from quire import LLM, SamplingParams

    rng = random.Random(seed)
    texts = prompts()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM("mini", num_threads=1, num_kv_blocks=64, **options) as llm:
        while True:
            number = rng.randrange(len(texts))
            [output] = llm.generate([texts[number]], params)
            yield number, output.outputs[0].token_ids, output.num_cached_tokens


def serve(directory: str, seed: int) -> None:
    """Print answers until killed."""
    options = {
        "kv_tier": "disk",
        "kv_tier_path": directory,
        "kv_tier_size": CAPACITY_GB,
        "kv_tier_min_uses": 1,
    }
    for answer in answers(seed, **options):
        print(json.dumps(answer), flush=True)


def expected() -> dict[int, list[int]]:
    """Return each prompt's continuation without a tier."""
    found: dict[int, list[int]] = {}
    for number, token_ids, _ in answers(0, enable_prefix_caching=False):
        found[number] = token_ids
        if len(found) == len(prompts()):
            return found
    raise AssertionError("answers never end")


def damage(file: Path, rng: random.Random) -> str:
    """Do something to a file; return what."""
    size = file.stat().st_size
    kind = rng.choice(["nothing", "flip", "tear", "cut"])
    if kind == "cut":
        os.truncate(file, rng.randrange(size + 1))
    if not size or kind in ("nothing", "cut"):
        return kind
    with file.open("r+b") as opened:
        for _ in range(rng.randrange(1, 6)):
            offset = rng.randrange(size)
            if kind == "flip":
                opened.seek(offset)
                byte = opened.read(1)[0]
                opened.seek(offset)
                opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
            else:
                opened.seek(rng.randrange(size) // 4096 * 4096)
                page = opened.read(4096)
                opened.seek(min(offset // 4096 * 4096, max(0, size - len(page))))
                opened.write(page)
    return kind


def kill_once(directory: Path, seed: int, right: dict[int, list[int]]) -> tuple[int, int]:
    """Run an engine and kill it; return its answers and the prompt tokens that it loaded or had cached."""
    command = [sys.executable, __file__, "--serve", str(directory), "--seed", str(seed)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    lines = [engine.stdout.readline()]
    time.sleep(random.Random(seed).uniform(0, LONGEST_LIFE))
    engine.send_signal(signal.SIGKILL)
    lines += engine.stdout.read().splitlines()[:-1]  # the last may be cut off
    engine.wait()
    found = [json.loads(line) for line in lines]
    for number, token_ids, _ in found:
        assert token_ids == right[number], f"seed {seed}, prompt {number}: {token_ids} != {right[number]}"
    return len(found), sum(num_cached for _, _, num_cached in found)


def main() -> None:
    """Kill as often as asked for, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--serve", default="")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.seed)
    right = expected()
    num_answers = num_tokens = 0
    done: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.seed, arguments.seed + arguments.kills):
            count, tokens = kill_once(Path(name), seed, right)
            num_answers, num_tokens = num_answers + count, num_tokens + tokens
            num_bytes = sum(file.stat().st_size for file in Path(name).iterdir())
            assert num_bytes <= CAPACITY_GB * 1e9, f"seed {seed}: {num_bytes} bytes"
            for file in Path(name).iterdir():
                kind = damage(file, random.Random(seed))
                done[kind] = done.get(kind, 0) + 1
    print(
        f"{arguments.kills} kills, {num_answers} answers, all right; {num_tokens} prompt tokens not computed"
    )
    print("damage to the file after a kill: " + ", ".join(f"{kind} {n}" for kind, n in sorted(done.items())))


if __name__ == "__main__":
    main()
