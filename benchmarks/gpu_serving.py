"""Requests of all lengths, offline, over HTTP and in `transformers`, and how long a server takes to start."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_engine import FIRST_TOKEN_ID

from quire import LLM, SamplingParams

SEED = 5


def requests_of(count: int, shortest: int, longest: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Return (prompt, output tokens) of requests whose lengths are uniform."""
    draw = random.Random(SEED)
    return [
        (
            [draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(draw.randint(shortest, longest))],
            draw.randint(shortest, longest),
        )
        for _ in range(count)
    ]


def quire_rate(llm: LLM, requests: list[tuple[list[int], int]]) -> float:
    """Return output tokens per second of all requests together, the second time."""
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _, length in requests]
    rate = 0.0
    for _ in range(2):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        rate = sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)
    return rate


def transformers_rate(model: str, requests: list[tuple[list[int], int]], device: str) -> float:
    """Return the same of continuous batching in `transformers`, whose requests all end at their own length.

    It has one maximum length for a call, so there is a call for each quarter of the lengths, of requests
    that all run to its longest; what they were not asked for does not count.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded = loaded.to(device).eval()
    by_length = sorted(requests, key=lambda request: request[1])
    size = -(-len(by_length) // 4)
    groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    rate = 0.0
    for _ in range(2):
        started = time.perf_counter()
        num_tokens = 0
        for group in groups:
            config = GenerationConfig(
                max_new_tokens=group[-1][1], do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            outputs = loaded.generate_batch([prompt for prompt, _ in group], generation_config=config)
            for output, (_, length) in zip(outputs.values(), group, strict=True):
                num_tokens += min(len(output.generated_tokens), length)
        rate = num_tokens / (time.perf_counter() - started)
    return rate


def bench(command: str, model: str, *options: str) -> dict[str, Any]:
    """Run `quire bench COMMAND` and return its figures."""
    line = [sys.executable, "-m", "quire.cli.main", "bench", command, model, *options, "--json", "-"]
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@contextlib.contextmanager
def server(
    model: str, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, float]]:
    """Yield the URL of a server, and the seconds from its start until it said that it is ready.

    Args:
        model: a directory.
        options: of `quire serve`.
        environment: variables to be set.
    """
    line = [sys.executable, "-m", "quire.cli.main", "serve", model, "--port", "0", *options]
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        ready = next((text for text in process.stdout if text.startswith("Ready:")), "")
        taken = time.perf_counter() - started
        try:
            if not ready:
                raise SystemExit(f"{' '.join(line)} ended before it was ready")
            yield ready.split()[1], taken
        finally:
            process.terminate()
