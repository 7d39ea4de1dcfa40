"""Requests that arrive at once and share a prefix that no cache has: how much is computed, and how fast.

All prompts begin with the same random tokens, new in each round, and each asks for one token, so that the
time is that until the last first token. Both engines may compute all prompts in one step.

    python benchmarks/burst.py [--requests 32] [--shared 250] [--rounds 3] [--model DIR] [--vllm PYTHON]

With `--vllm`, the interpreter of an environment with vLLM (`make bench-scheduler` sets one up), vLLM does the
same afterwards. The model has Qwen3-0.6B's shape and random weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

from random_model import random_model

MAX_TOKENS_PER_STEP = 8_192
OWN_TOKENS = 6
FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has


def prompts_of(num_requests: int, num_shared: int, seed: int) -> list[list[int]]:
    """Return random prompts that share their first `num_shared` tokens."""
    rng = random.Random(seed)
    ids = range(FIRST_ID, END_ID)
    prefix = rng.choices(ids, k=num_shared)
    return [prefix + rng.choices(ids, k=OWN_TOKENS) for _ in range(num_requests)]


def open_engine(name: str, model: str) -> tuple[Any, Any]:
    """Return an engine, and the sampling parameters for one token. Both engines take the same options."""
    package = importlib.import_module(name)
    llm = package.LLM(
        model,
        dtype="bfloat16",
        max_model_len=2_048,
        max_num_seqs=64,
        max_num_batched_tokens=MAX_TOKENS_PER_STEP,
        enable_prefix_caching=True,
        **({"num_kv_blocks": 1_360} if name == "quire" else {"kv_cache_memory_bytes": 5 << 29}),
    )
    return llm, package.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each round, and the prompt tokens that the last one computed."""
    llm, sampling = open_engine(name, options.model)
    seconds, computed = [], 0
    for seed in range(options.rounds + 1):
        prompts = prompts_of(options.requests, options.shared, seed)
        inputs = prompts if name == "quire" else [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = llm.generate(inputs, sampling)
        seconds.append(time.perf_counter() - started)
        computed = sum(map(len, prompts)) - sum(output.num_cached_tokens for output in outputs)
    return {"engine": name, "seconds": [round(each, 3) for each in seconds[1:]], "computed_tokens": computed}


def main() -> None:
    """Run each engine in a process of its own, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=250, help="tokens that all prompts begin with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="directory of the model; made if not given")
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(measure(options.engine, options)), flush=True)
        return
    with random_model(options.model) as model:
        engines = {"quire": sys.executable} | ({"vllm": options.vllm} if options.vllm else {})
        for name, python in engines.items():
            command = [python, __file__, "--engine", name, "--model", model]
            for field in ("requests", "shared", "rounds"):
                command += [f"--{field}", str(getattr(options, field))]
            environment = {**os.environ, "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
            done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
            # vLLM also logs to standard output, even after the program's own end.
            print(next(line for line in done.stdout.splitlines() if line.startswith("{")), flush=True)


if __name__ == "__main__":
    main()
