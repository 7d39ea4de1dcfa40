"""What a prompt costs that another engine has left in a Mooncake store.

The model has Qwen3-0.6B's shape and random weights; `mooncake_master` runs on this machine, and blocks travel
over loopback. Engines take turns: one computes a prompt, the other reads it, once for each round. Then the
master is killed while the second one reads. All answers must be equal to those that were computed.

    python benchmarks/mooncake_store.py [--prompt-len 1024] [--rounds 5] [--model DIR]

Needs `pip install 'quire[mooncake]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import files
from typing import Any
from unittest import mock

from kv_tiers import prompt_of
from random_model import random_model

from quire import LLM
from quire.kv.tiers.mooncake.client import StoreLane
from quire.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
WHEEL = "mooncake-transfer-engine-non-cuda"


@contextlib.contextmanager
def master() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a master of a store; yield its process and its address."""
    [program] = [
        file for file in files(WHEEL) or [] if file.name == "mooncake_master" and "bin" not in file.parts
    ]
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = free.getsockname()[1], other.getsockname()[1]
    options = [f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1"]
    command = [str(program.locate()), *options, "--metrics_host=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        yield process, f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def open_llm(model: str, address: str, gigabytes: float) -> LLM:
    """Return an engine with the store at an address, to which it lends memory."""
    store = {"kv_tier_store": address, "kv_tier_size": gigabytes, "kv_tier_min_uses": 1}
    return LLM(model, dtype="bfloat16", num_kv_blocks=512, kv_tier="mooncake", **store)


def ask(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds that a prompt and its short answer take, and the answer."""
    started = time.perf_counter()
    [output] = llm.generate([prompt], GREEDY)
    return time.perf_counter() - started, output.outputs[0].token_ids


def wait_until_stored(llm: LLM, num_blocks: int) -> None:
    """Wait until a store has been sent as many blocks, for up to a minute."""
    deadline = time.monotonic() + 60
    while llm.stats().kv_connector.num_written_blocks < num_blocks:
        assert time.monotonic() < deadline, llm.stats().kv_connector
        time.sleep(0.01)


@contextlib.contextmanager
def killed_at_read(number: int, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process right before as many blocks have been read."""
    call, numbers = StoreLane.call, itertools.count(1)

    def call_or_kill(lane: StoreLane, operation: str, *arguments: Any) -> list[int]:
        if operation == "get" and next(numbers) == number:
            process.kill()
            process.wait()
        return call(lane, operation, *arguments)

    with mock.patch.object(StoreLane, "call", call_or_kill):
        yield


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-len", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="prompts that are read")
    parser.add_argument("--model", default="", help="directory of a model; empty: random weights")
    options = parser.parse_args()
    prompts = [prompt_of(options.prompt_len, seed) for seed in range(options.rounds + 2)]
    computed, read, answers = [], [], []
    gigabytes = 0.15 * options.prompt_len / 1024 * len(prompts)
    with (
        random_model(options.model) as model,
        master() as (process, address),
        open_llm(model, address, gigabytes) as first,
        open_llm(model, address, 0) as second,
    ):
        for prompt in prompts:
            seconds, answer = ask(first, prompt)
            computed.append(seconds)
            answers.append(answer)
            wait_until_stored(first, len(answers) * (options.prompt_len // 16))
        for prompt, answer in zip(prompts[:-1], answers, strict=False):
            seconds, found = ask(second, prompt)
            assert found == answer, "the store changed the answer"
            read.append(seconds)
        seconds_computed, seconds_read = (statistics.median(times[1:]) for times in (computed, read))
        num_read = second.stats().kv_connector.num_loaded_blocks
        print(f"computed {seconds_computed:8.3f} s  {', '.join(f'{value:.3f}' for value in computed)}")
        print(f"read     {seconds_read:8.3f} s  {', '.join(f'{value:.3f}' for value in read)}")
        print(f"share    {seconds_read / seconds_computed:8.3f}    {num_read} blocks read")
        with killed_at_read(options.prompt_len // 32, process):
            seconds, found = ask(second, prompts[-1])
        assert found == answers[-1], "the store changed the answer"
        stats = second.stats().kv_connector
        print(
            f"killed   {seconds:8.3f} s  {stats.num_loaded_blocks - num_read} blocks read, "
            f"{stats.num_failed_reads} reads failed"
        )


if __name__ == "__main__":
    main()
