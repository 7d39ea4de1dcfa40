"""Quire on one GPU, beside what that GPU can do: each aim with what was measured.

    python benchmarks/gpu.py [--models Qwen3-0.6B Llama-3-8B Qwen3-30B-A3B] [--measure steps served] [--json]

Weights are random. Copies and products are measured first, and steps are compared with these: a decode step
with the time to copy its weights and KV, prompts with the time of their products. Then come requests of all
lengths beside the continuous batching of `transformers`, 64 streams over HTTP beside the same requests
offline, the time until a server is ready, attention by itself (beside FlashInfer's where that is installed),
and the kernels of decode steps beside what they read, write and compute. Of a decode step, what its capture
takes the GPU is said, too. There is one way to compute a batch, and it is batch-invariant: what that costs is
in all rows, and has none of its own.

`--tiny` goes through the same code on a CPU, but for `transformers`, with models of no use; its figures say
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_attention import attention_lines
from gpu_engine import captured_steps, decode_seconds, prefill_seconds, read_share, replay_seconds
from gpu_machine import copy_bandwidth, product_rate
from gpu_models import CONFIGS, model_without_files
from gpu_profile import busy_share, kernel_times, profile_table
from gpu_roofline import decode_bytes, decode_work, num_experts, prefill_operations
from gpu_serving import bench, quire_rate, requests_of, server, transformers_rate
from peers_model import write_checkpoint
from peers_shapes import SHAPES
from random_model import random_model

from quire import LLM
from quire.execution.model_runner import ModelRunner
from quire.kernels.devices.device import cuda_obstacle
from quire.kernels.triton import kernel
from quire.models.checkpoints.config_reading import read_model_config

DECODE_AIMS = {"Qwen3-0.6B": 0.60, "Llama-3-8B": 0.85, "Qwen3-30B-A3B": 0.70}
PREFILL_AIM = 0.75
FP8_AIM = 1.5
TRANSFORMERS_AIM = 3.0
SERVED_AIM = 0.95
CAPTURED_AIM = 1.0
BUSY_AIM = 0.95
READY_AIM = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    num_requests: tuple[int, ...] = (1, 64, 256)
    context: int = 1_024
    num_steps: int = 64
    prefill: tuple[int, int] = (8, 1_024)  # prompts, tokens of each
    offline: tuple[int, int, int] = (256, 100, 1_024)  # requests, shortest and longest
    served: tuple[int, int, int] = (64, 1_000, 200)  # streams, input and output tokens
    copy_bytes: int = 4 << 30
    product_size: int = 8_192
    engine: dict[str, Any] = dataclasses.field(default_factory=lambda: {"device": "cuda"})


TINY = Sizes(
    num_requests=(1, 2),
    context=20,
    num_steps=3,
    prefill=(2, 16),
    offline=(3, 4, 9),
    served=(2, 8, 4),
    copy_bytes=1 << 20,
    product_size=64,
    engine={"device": "cpu", "num_kv_blocks": 64, "max_model_len": 128},
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One aim, and what was measured of it."""

    name: str
    measured: str
    ratio: float
    aim: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the aim is."""
        return self.ratio <= self.aim if self.at_most else self.ratio >= self.aim


def of_models(names: list[str], sizes: Sizes, bandwidth: float, rate: float) -> Iterator[Row]:
    """Yield the rows of decode steps and prompts of each model."""
    for name in names:
        with model_without_files(name, is_tiny=sizes is TINY) as directory:
            config = read_model_config(Path(directory))
            speeds = {}
            has_fp8 = name == "Llama-3-8B" and sizes is not TINY
            for quantization in ("none", "fp8")[: 1 + has_fp8]:
                with _engine(directory, sizes, quantization=quantization) as llm:
                    if quantization == "none":
                        yield from _decode_rows(llm, name, config, sizes, bandwidth)
                    seconds = prefill_seconds(llm, *sizes.prefill)
                speeds[quantization] = 1 / seconds
                if quantization == "none" and name == "Llama-3-8B":
                    share = prefill_operations(config, *sizes.prefill) / seconds / rate
                    title = f"{name}, {sizes.prefill[0] * sizes.prefill[1]} tokens of prompts"
                    yield Row(title, f"{seconds * 1e3:.1f} ms", share, PREFILL_AIM)
            if "fp8" in speeds:
                gain = speeds["fp8"] / speeds["none"]
                yield Row(f"{name}, the same in fp8", f"{1e3 / speeds['fp8']:.1f} ms", gain, FP8_AIM)


def _decode_rows(llm: LLM, name: str, config: Any, sizes: Sizes, bandwidth: float) -> Iterator[Row]:
    for count in sizes.num_requests:
        read = read_share(llm, count, sizes.context, num_experts(config))
        with captured_steps() as replays:
            seconds = decode_seconds(llm, count, sizes.context, sizes.num_steps)
        of_gpu = replay_seconds(replays, count)
        captured = "" if of_gpu is None else f", captured {of_gpu * 1e3:.3f}"
        context = sizes.context + sizes.num_steps // 2
        share = decode_bytes(config, count, context, read) / bandwidth / seconds
        of_experts = "" if read is None else f", {read:.0%} of experts"
        title = f"{name}, decode, {count} requests"
        yield Row(title, f"{seconds * 1e3:.3f} ms{captured}{of_experts}", share, DECODE_AIMS[name])


def _engine(directory: str, sizes: Sizes, **options: Any) -> LLM:
    engine = {"max_num_seqs": max(sizes.num_requests), **sizes.engine, **options}
    return LLM(directory, dtype="bfloat16", **engine)


def _options(sizes: Sizes) -> list[str]:
    """Return the engine's settings as options of commands."""
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sizes.engine.items()]
    return [part for flag in flags for part in flag]


def of_offline(model: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the row of requests of all lengths, beside `transformers`."""
    with _engine(model, sizes, max_num_seqs=sizes.offline[0]) as llm:
        requests = requests_of(*sizes.offline, llm.info.vocab_size)
        ours = quire_rate(llm, requests)
    if sizes is not TINY:
        theirs = transformers_rate(model, requests, sizes.engine["device"])
        rates = f"{ours:.0f} and {theirs:.0f} tokens/s"
        yield Row("offline, beside transformers", rates, ours / theirs, TRANSFORMERS_AIM)


def of_prompts(model: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the row of requests that begin beside others: their steps captured, and asked for one by one."""
    with _engine(model, sizes, max_num_seqs=sizes.served[0]) as llm:
        requests = requests_of(*sizes.offline, llm.info.vocab_size)
        captured = quire_rate(llm, requests)
        with mock.patch.object(ModelRunner, "_is_small", return_value=False):
            one_by_one = quire_rate(llm, requests)
    name = f"{sizes.served[0]} at a time: steps with prompts captured"
    yield Row(name, f"{captured:.0f} and {one_by_one:.0f} tokens/s", captured / one_by_one, CAPTURED_AIM)


def of_served(model: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the rows of streams over HTTP, and of a server's start."""
    options = _options(sizes)
    streams, length, output = sizes.served
    load = ["--num-prompts", str(4 * streams), "--input-len", str(length), "--output-len", str(output)]
    offline = bench("throughput", model, *load, *options, "--max-num-seqs", str(streams))
    with server(model, *options) as (url, seconds):
        load += ["--max-concurrency", str(streams), "--base-url", f"{url}/v1"]
        served = bench("serve", model, *load)
    of_both = [figures["results"]["output_tokens_per_second"] for figures in (served, offline)]
    name = f"{streams} streams of {length}/{output} over HTTP, beside offline"
    rates = f"{of_both[0]:.0f} and {of_both[1]:.0f} tokens/s"
    yield Row(name, rates, of_both[0] / of_both[1], SERVED_AIM)
    yield Row("ready, Qwen3-0.6B", f"{seconds:.1f} s", seconds, READY_AIM, at_most=True)


def of_busy(model: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the row of how busy the GPU is. The profiler may slow down what is measured after it."""
    with _engine(model, sizes) as llm:
        busy = busy_share(llm, sizes.served[0], sizes.context)
    yield Row(f"decode, {sizes.served[0]} requests: the GPU is busy", f"{busy:.1%}", busy, BUSY_AIM)


def of_first_start(model: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the row of a server's first start."""
    with (
        tempfile.TemporaryDirectory() as empty,
        server(model, *_options(sizes), environment={"TRITON_CACHE_DIR": empty}) as (_, seconds),
    ):
        yield Row(
            "ready, the first time: kernels are compiled",
            f"{seconds:.1f} s",
            seconds,
            READY_AIM,
            at_most=True,
        )


OF_REQUESTS = {
    "offline": of_offline,
    "prompts": of_prompts,
    "served": of_served,
    "start": of_first_start,
    "busy": of_busy,
}
MEASUREMENTS = "steps", *OF_REQUESTS, "attention", "profiles"


def of_requests(which: list[str], sizes: Sizes, directory: str) -> Iterator[Row]:
    """Yield the rows of requests to a model in a directory; empty: one that is written first."""
    if not set(which) & set(OF_REQUESTS):
        return
    with _written_model(sizes, directory) as model:
        for name, rows_of in OF_REQUESTS.items():  # in this order, in which the profiler comes last
            if name in which:
                yield from rows_of(model, sizes)


@contextlib.contextmanager
def _written_model(sizes: Sizes, directory: str) -> Iterator[str]:
    """Yield a directory with weights, which other processes read, too."""
    if sizes is not TINY:
        with random_model(directory) as model:
            yield model
        return
    changes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 2_000}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    with tempfile.TemporaryDirectory() as tiny:
        write_checkpoint(SHAPES["0.6b"].config | changes | heads, Path(tiny))
        yield tiny


def profiles_of(names: list[str], sizes: Sizes, bandwidth: float, rate: float) -> Iterator[str]:
    """Yield the lines of a table for each model: the kernels of its decode steps."""
    count, context = sizes.num_requests[1], sizes.context
    for name in names:
        with model_without_files(name, is_tiny=sizes is TINY) as directory:
            config = read_model_config(Path(directory))
            # One after the other: a kernel that is launched early has in its time what it waits.
            with (
                mock.patch.object(kernel, "launches_early", return_value=False),
                _engine(directory, sizes) as llm,
            ):
                read = read_share(llm, count, context, num_experts(config))
                times = kernel_times(llm, count, context)
            work = decode_work(config, count, context, read)
        yield f"{name}, a decode step of {count} requests of {context} tokens"
        yield from profile_table(times, work, bandwidth, rate)


def attention_of(names: list[str], sizes: Sizes, bandwidth: float, rate: float) -> Iterator[str]:
    """Yield lines of attention by itself, of decode steps and of prompts, at each model's heads."""
    count, context = sizes.num_requests[1], sizes.context
    num_prompts, length = sizes.prefill
    cases = {
        f"{count} decodes of {context} tokens": (count, context - 1, 1),
        f"{num_prompts} prompts of {length} tokens": (num_prompts, 0, length),
    }
    for name in names:
        with model_without_files(name, is_tiny=sizes is TINY) as directory:
            model = read_model_config(Path(directory))
        yield from attention_lines(name, model, cases, bandwidth, rate)


def main() -> int:
    """Measure and print; return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="default: all")
    parser.add_argument(
        "--measure", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="default: all"
    )
    parser.add_argument(
        "--directory", default="", help="what benchmarks/peers_model.py has written; default: a new one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tiny", action="store_true", help="go through the code on a CPU")
    options = parser.parse_args()
    obstacle = "" if options.tiny else cuda_obstacle()
    if obstacle:
        print(f"nothing was measured: {obstacle}", file=sys.stderr)
        return 2
    sizes = TINY if options.tiny else Sizes()
    device = torch.device(sizes.engine["device"])
    bandwidth, rate = copy_bandwidth(device, sizes.copy_bytes), product_rate(device, sizes.product_size)
    rows = []
    if not options.json:
        name = "CPU" if options.tiny else torch.cuda.get_device_name()
        print(
            f"{name}, torch {torch.__version__}: copies {bandwidth / 1e9:.0f} GB/s read and written, ", end=""
        )
        print(f"products in bfloat16 {rate / 1e12:.1f} Top/s", flush=True)
    models = options.models
    steps = of_models(models if "steps" in options.measure else [], sizes, bandwidth, rate)
    for row in itertools.chain(steps, of_requests(options.measure, sizes, options.directory)):
        rows.append(row)
        if not options.json:
            sign = "at most" if row.at_most else "at least"
            verdict = "" if row.is_met else "  missed"
            line = f"{row.name:48} {row.measured:28} {row.ratio:6.2f}   aim: {sign} {row.aim}{verdict}"
            print(line, flush=True)
    if options.json:
        print(json.dumps({"bandwidth": bandwidth, "rate": rate, "rows": [*map(dataclasses.asdict, rows)]}))
    else:
        attention = attention_of(models if "attention" in options.measure else [], sizes, bandwidth, rate)
        profiles = profiles_of(models if "profiles" in options.measure else [], sizes, bandwidth, rate)
        for line in itertools.chain(attention, profiles):
            print(line, flush=True)
    return int(not all(row.is_met for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
