"""Embeddings beside streams of generation, by two models in one server, and each without the other.

    python benchmarks/embed_beside_generation.py [--generator ''] [--embedder ''] [--seconds 20] [--json]

The server is `quire serve GENERATOR --model EMBEDDER`. 16 streams of completions and 4 connections that embed
texts each send the next request as soon as the last one is answered: first only the former, then only the
latter, then both. Printed are tokens/s and the 99th percentile of the time between two events of a stream,
texts/s and the 99th percentile of the time of a request; with all cores for each engine, and with half of
them. `''` makes a model with random weights, in the shape of Qwen3-0.6B or of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from peers_model import write_tokenizer
from random_model import random_model

STREAMS, CONNECTIONS = 16, 4
PROMPT_LEN, OUTPUT_LEN = 64, 64  # tokens of a completion
TEXTS, TEXT_LEN = 8, 128  # of a request for embeddings: texts, and tokens of the longest
FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
LOADS = ("generation", "embeddings", "both")
MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}


class Figures:
    """What a load has been answered, and the seconds of each wait."""

    def __init__(self) -> None:
        self.count = 0  # tokens or texts
        self.waits: list[float] = []

    def summary(self, seconds: float) -> dict[str, float]:
        """Return the rate, and the 99th percentile of the waits in milliseconds."""
        p99 = float(np.percentile(self.waits, 99)) if self.waits else math.nan
        return {"per_second": self.count / seconds, "p99_ms": 1000 * p99}


@contextlib.contextmanager
def random_encoder(directory: str) -> Iterator[str]:
    """Yield `directory`; if it is empty, a temporary one with random weights in MiniLM-L6's shape."""
    if directory:
        yield directory
        return
    import transformers

    with tempfile.TemporaryDirectory() as made:
        transformers.BertModel(transformers.BertConfig(**MINILM)).save_pretrained(made)
        write_tokenizer(Path(made))  # only needed for loading: texts are token ids
        yield made


@contextlib.contextmanager
def serving(generator: str, embedder: str, num_threads: int) -> Iterator[str]:
    """Yield the URL of a server of both models, `generator` and `embedder` by name."""
    models = "".join(
        f"- {{model: {path}, served-model-name: {name}}}\n"
        for path, name in ((generator, "generator"), (embedder, "embedder"))
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.yaml")
        file.write_text(f"port: 0\nnum-threads: {num_threads}\nmodels:\n{models}", encoding="utf-8")
        command = [sys.executable, "-m", "quire.cli.main", "serve", "--config", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().split()[1]
            finally:
                process.terminate()


def token_ids(length: int) -> list[int]:
    """Return a random prompt."""
    return random.choices(range(FIRST_ID, END_ID), k=length)


async def generate(http: httpx.AsyncClient, until: float) -> Figures:
    """Stream completions one after the other until a time."""
    figures = Figures()
    while time.monotonic() < until:
        body = {
            "model": "generator",
            "prompt": token_ids(PROMPT_LEN),
            "max_tokens": OUTPUT_LEN,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        last = None
        async for event in events(http, body):
            now = time.monotonic()
            if now > until:
                break
            figures.count += sum(len(choice.get("token_ids", ())) for choice in event["choices"])
            if last is not None:
                figures.waits.append(now - last)
            last = now
    return figures


async def events(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed completion."""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def embed(http: httpx.AsyncClient, until: float) -> Figures:
    """Embed texts, request after request, until a time."""
    figures = Figures()
    while (began := time.monotonic()) < until:
        texts = [token_ids(random.randint(TEXT_LEN // 8, TEXT_LEN)) for _ in range(TEXTS)]
        body = {"model": "embedder", "input": texts, "encoding_format": "base64"}
        (await http.post("/v1/embeddings", json=body)).raise_for_status()
        if (now := time.monotonic()) <= until:
            figures.count += TEXTS
            figures.waits.append(now - began)
    return figures


async def measured(url: str, load: str, seconds: float) -> dict[str, dict[str, float]]:
    """Return the figures of a load: of what it generates, of what it embeds, or of both."""
    numbers = {"generation": STREAMS, "embeddings": CONNECTIONS}
    work = {"generation": generate, "embeddings": embed}
    asked = [load] if load in work else list(work)
    limits = httpx.Limits(max_connections=STREAMS + CONNECTIONS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        until = time.monotonic() + seconds
        lists = await asyncio.gather(
            *(asyncio.gather(*(work[kind](http, until) for _ in range(numbers[kind]))) for kind in asked)
        )
    results = {}
    for kind, figures in zip(asked, lists, strict=True):
        total = Figures()
        for each in figures:
            total.count += each.count
            total.waits += each.waits
        results[kind] = total.summary(seconds)
    return results


def main() -> None:
    """Measure all loads, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--generator", default="")
    parser.add_argument("--embedder", default="")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = []
    with random_model(options.generator) as generator, random_encoder(options.embedder) as embedder:
        for num_threads in sorted({cores, max(1, cores // 2)}, reverse=True):
            with serving(generator, embedder, num_threads) as url:
                asyncio.run(measured(url, "both", options.seconds / 2))  # warms up
                for load in LOADS:
                    figures = asyncio.run(measured(url, load, options.seconds))
                    rows.append({"threads": num_threads, "load": load, **figures})
    if options.json:
        print(json.dumps(rows))
        return
    print("threads of each  load         tokens/s  p99 of a token   texts/s  p99 of a request")
    for row in rows:
        cells = [
            f"{row[kind]['per_second']:8.1f}  {row[kind]['p99_ms']:11.0f} ms" if kind in row else " " * 24
            for kind in ("generation", "embeddings")
        ]
        print(f"{row['threads']:15}  {row['load']:11}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
