"""How much of prompts a model with recurrent layers finds in its prefix cache, beside other servers.

Conversations of several turns over one system prompt, all of one turn before those of the next, some at a
time, as random token ids; answers are greedy, and part of the next prompt. Each server runs alone, with the
files and environments of `peers.py`, and memory for all conversations. Printed is the share of prompt tokens
that each found cached, and the time to the first token. The last row is Quire with a model that has attention
only (Qwen3-0.6B's shape): the share of full prefix caching. A server that cannot run is left out, with the
end of its log.

    python benchmarks/hybrid_prefix.py [--shape qwen3.5-0.8b] [--precision bf16] [--conversations 32]
                                       [--turns 8] [--at-once 4] [--servers Quire ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from peers import LOGS, write_files
from peers_engines import CHECKPOINT, KINDS, MODELS, PEERS
from peers_process import LOG_TAIL_CHARS
from peers_shapes import SHAPES, SMALLEST_VOCABULARY
from peers_workload import FIRST_ORDINARY_TOKEN, NUM_THREADS, PRECISIONS

ATTENTION_ONLY = "0.6b"
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 512, 48, 16
STARTING_SECONDS = 600
PORT = 8_777
URL = f"http://127.0.0.1:{PORT}"


@dataclass
class Found:
    """What a server found cached, and the seconds to each first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


class OpenAIServer:
    """Quire and vLLM: completions in OpenAI's shape, with token ids."""

    path = "/v1/completions"

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self.command = command.split()
        self.environ = environ

    def body(self, prompt: list[int], model: str) -> dict[str, Any]:
        """Return the request for an answer to a prompt."""
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: dict[str, Any]) -> tuple[list[int], int]:
        """Return the tokens of an event, and how many of the prompt it says were cached."""
        choices = event.get("choices") or [{}]
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        return choices[0].get("token_ids") or [], details.get("cached_tokens") or 0


class LlamaServer(OpenAIServer):
    """llama.cpp's server, in its own shape."""

    path = "/completion"

    def body(self, prompt: list[int], model: str) -> dict[str, Any]:
        """See `OpenAIServer.body`."""
        sampling = {"n_predict": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        return {"prompt": prompt, "stream": True, "return_tokens": True, "cache_prompt": True, **sampling}

    def read(self, event: dict[str, Any]) -> tuple[list[int], int]:
        """See `OpenAIServer.read`."""
        return event.get("tokens") or [], event.get("timings", {}).get("cache_n", 0)


def servers(options: argparse.Namespace, room: int) -> dict[str, OpenAIServer]:
    """Return the servers by their labels, each with memory for `room` tokens."""
    shape, precision, at_once = options.shape, options.precision, options.at_once
    num_states = at_once + 3 * options.conversations

    def files(kind: str, of_shape: str = shape) -> str:
        directory = KINDS[kind].model(precision, of_shape)
        for needed in (MODELS / of_shape / CHECKPOINT, directory):
            if not needed.exists():
                write_files(needed)
        return str(directory)

    def quire(of_shape: str, more: str = "") -> OpenAIServer:
        quantized = "" if precision == "bf16" else f"--quantization {precision} --kv-cache-dtype int8"
        return OpenAIServer(
            f"{Path(sys.executable).with_name('quire')} serve {files('quire', of_shape)} "
            f"--max-num-seqs {at_once} --num-kv-blocks {room // 16} --port {PORT} {quantized} {more} "
            "--served-model-name model",
            {},
        )

    kv_bytes = 2 * SHAPES[shape].kv_values * room
    vllm = f"--kv-cache-memory-bytes {kv_bytes} --max-num-seqs {at_once} --max-model-len 4096 --port {PORT}"
    llama = f"-c {room} -np {at_once} --kv-unified -t {NUM_THREADS} -fa on --port {PORT}"
    return {
        "Quire": quire(shape, f"--num-linear-attention-blocks {num_states}"),
        "llama.cpp": LlamaServer(
            f"{PEERS}/llamacpp/server/bin/llama-server -m {files('llamacpp')}/model.gguf "
            f"{llama} --cache-ram -1 --checkpoint-min-step 0",
            {},
        ),
        "vLLM": OpenAIServer(
            f"{KINDS['vllm'].python} -m vllm.entrypoints.openai.api_server --model {files('vllm')} "
            f"--served-model-name model {vllm} --enable-prefix-caching --enable-prompt-tokens-details",
            KINDS["vllm"].environ(),
        ),
        "Quire, attention only": quire(ATTENTION_ONLY),
    }


async def converse(server: OpenAIServer, options: argparse.Namespace) -> Found:
    """Run all conversations against a server that is up."""
    rng = random.Random(7)
    ids = range(FIRST_ORDINARY_TOKEN, SMALLEST_VOCABULARY - FIRST_ORDINARY_TOKEN)
    prompts = [rng.choices(ids, k=SYSTEM_TOKENS)] * options.conversations
    found, slots = Found(), asyncio.Semaphore(options.at_once)
    connections = aiohttp.TCPConnector(force_close=True)  # llama.cpp closes them after a while
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as http:

        async def turn(prompt: list[int]) -> list[int]:
            async with slots:
                return prompt + await answered(http, server, prompt, found)

        for _ in range(options.turns):
            asked = [prompt + rng.choices(ids, k=USER_TOKENS) for prompt in prompts]
            prompts = list(await asyncio.gather(*map(turn, asked)))
    return found


async def answered(
    http: aiohttp.ClientSession, server: OpenAIServer, prompt: list[int], found: Found
) -> list[int]:
    """Return the tokens of the answer to a prompt."""
    tokens: list[int] = []
    started = time.perf_counter()
    async with http.post(f"{URL}{server.path}", json=server.body(prompt, "model")) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                new, num_cached = server.read(json.loads(line[6:]))
                if new and not tokens:
                    found.first_token_seconds.append(time.perf_counter() - started)
                tokens += new
                found.cached_tokens += num_cached
    if len(tokens) != ANSWER_TOKENS:
        raise RuntimeError(f"an answer has {len(tokens)} tokens in place of {ANSWER_TOKENS}")
    found.prompt_tokens += len(prompt)
    return tokens


@contextlib.asynccontextmanager
async def running(label: str, server: OpenAIServer) -> AsyncIterator[None]:
    """Run a server.

    Raises:
        RuntimeError: it is not up in time, or has ended; the message has the end of its log.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"hybrid-prefix-{label.replace(' ', '-').replace(',', '')}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if not await _is_up(process):
            raise RuntimeError(f"it did not start:\n{log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _is_up(process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + STARTING_SECONDS
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{URL}/health") as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(0.2)
    return False


async def compare(options: argparse.Namespace) -> None:
    """Run each server and print its row."""
    length = SYSTEM_TOKENS + options.turns * (USER_TOKENS + ANSWER_TOKENS)
    room = (options.conversations + 1) * (length + 64) // 128 * 128
    print(f"{options.shape}, {options.precision}; prompts of up to {length - ANSWER_TOKENS} tokens")
    print(f"{'':<24}{'cached':>8}{'first token, median':>22}{'slowest 1 in 100':>20}{'all':>10}")
    every = servers(options, room)
    for label, server in ((label, every[label]) for label in options.servers or every):
        try:
            async with running(label, server):
                started = time.perf_counter()
                found = await converse(server, options)
                seconds = time.perf_counter() - started
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            print(f"{label}: {error}", flush=True)
            continue
        first = sorted(found.first_token_seconds)
        print(
            f"{label:<24}{found.cached_tokens / found.prompt_tokens:>8.1%}"
            f"{statistics.median(first) * 1000:>19.0f} ms{first[len(first) * 99 // 100] * 1000:>17.0f} ms"
            f"{seconds:>8.0f} s",
            flush=True,
        )


def main() -> None:
    """Compare the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--servers", nargs="*", help="labels in the table; default: all")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
