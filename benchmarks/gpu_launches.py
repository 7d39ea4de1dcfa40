"""What steps with prompts cost the host of a GPU, captured and not, and how many are, measured without a GPU.

    python benchmarks/gpu_launches.py [--measure launches start replays] [--num-tokens 200] [--num-decodes 64]
        [--num-steps 2500]

First a chunk of a prompt beside decodes: the host plans attention, and asks for each kernel, or for the
capture of all. The models have as many layers as those that people run, and are tiny otherwise. Kernels are
compiled for an H100, which needs none, and not launched: what calls of CUDA take is missing, in both figures.

The same of all the steps that are made up before the first request (`quire.execution.profile_run`).

Then requests that begin one after the other, each when another has ended: how many of the steps in which one
begins are replayed from the capture of an earlier one, and how many rows these add that are nobody's. Steps
of more than 4,096 tokens are taken not to be captured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_models import CONFIGS, model_without_files
from timing import least_seconds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.execution.model_runner import ModelRunner
from quire.execution.profile_run import StepLimits, profile_run
from quire.execution.step_graphs import StepGraphs
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.devices.cores import usable_cores
from quire.kernels.size_classes import wide_size_class
from quire.kernels.triton import device
from quire.kernels.triton.kernel import compile_only
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.models.checkpoints import loading
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.decoder import Decoder

BLOCK_SIZE = 16
CONTEXT = 600  # tokens of a decode
REPEATS = 20
REPEATS_OF_START = 3
MOST_TOKENS = 4_096
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4_096
MEASUREMENTS = "launches", "start", "replays"


class Hopper:
    """What Triton asks of a GPU's driver."""

    def get_current_target(self) -> GPUTarget:
        """Return what kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Return the only one."""
        return 0

    def launcher_cls(self, _src: Any, _metadata: Any) -> None:
        """Return what launches a kernel, which nobody does."""


def batch_of(num_decodes: int, num_tokens: int) -> AttentionBatch:
    """Return the batch of a step."""
    computed = np.array([CONTEXT] * num_decodes + [0])
    tables = np.zeros((num_decodes + 1, 1 + max(CONTEXT, num_tokens) // BLOCK_SIZE), dtype=np.int32)
    return AttentionBatch.build(computed, [1] * num_decodes + [num_tokens], tables, BLOCK_SIZE)


def requests_of(kind: str) -> Iterator[tuple[int, int, int]]:
    """Yield requests: tokens in the prefix cache, further tokens of the prompt, and of the output."""
    numbers = random.Random(0)
    while True:
        if kind == "documents":
            yield 0, numbers.randint(100, 1_024), numbers.randint(100, 1_024)
        else:
            yield BLOCK_SIZE * numbers.randint(0, 200), numbers.randint(20, 300), numbers.randint(50, 400)


def steps_of(kind: str, num_running: int, num_steps: int) -> Iterator[AttentionBatch]:
    """Yield the batches of steps that have as many requests; each prompt is one chunk."""
    requests = requests_of(kind)
    running = [list(next(requests)) for _ in range(num_running)]
    for _ in range(num_steps):
        computed, num_tokens, _ = np.array(running).T
        width = -(-int((computed + num_tokens).max()) // BLOCK_SIZE)
        yield AttentionBatch.build(
            computed, num_tokens, np.zeros((num_running, width), dtype=np.int32), BLOCK_SIZE
        )
        for number, (length, chunk, left) in enumerate(running):
            running[number] = [length + chunk, 1, left - 1] if left > 1 else list(next(requests))


class Captures:
    """Counts them, and how often one is replayed after the step that it was made in; they do nothing."""

    num_captured = 0
    num_again = 0

    def capture(self, _compute: Callable[[], None]) -> Callable[[], None]:
        """See `quire.execution.step_graphs.Capture`."""
        self.num_captured += 1
        self.num_again -= 1
        return self._replay

    def _replay(self) -> None:
        self.num_again += 1


def graphs_of(model: Decoder, cache: PagedAttentionCache, captures: Captures) -> StepGraphs:
    """Return what captures the steps of a model."""
    return StepGraphs(model.whole_step, cache.views, captures.capture, lambda ids: ids, model.kernels)


@contextlib.contextmanager
def as_if_launched() -> Iterator[None]:
    """Let no kernel be launched, and steps be captured as if all were."""
    from quire.kernels.triton.kernel_set import TritonKernels

    with compile_only(1), mock.patch.object(TritonKernels, "compiles_only", new=False):
        yield


def print_replays(kind: str, num_running: int, num_steps: int) -> None:
    """Print how many steps with prompts are replayed from a capture of an earlier one."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model, cache = model_of("Qwen3-0.6B", **sizes)
    captures, num_prompts, num_tokens, num_rows = Captures(), 0, 0, 0
    graphs = graphs_of(model, cache, captures)
    with as_if_launched():
        for batch in steps_of(kind, num_running, num_steps):
            if num_running < batch.num_rows <= MOST_TOKENS:
                num_prompts += 1
                num_tokens += batch.num_rows
                num_rows += wide_size_class(batch.num_rows)
                ids = np.zeros(batch.num_rows, dtype=np.int64)
                graphs.logits(ids, batch, np.cumsum(batch.num_tokens) - 1)
    print(
        f"{kind}, {num_running} requests: {num_prompts} steps with prompts, "
        f"{captures.num_captured} captured, {captures.num_again / num_prompts:.0%} like one before, "
        f"{num_rows / num_tokens - 1:.0%} rows added",
        flush=True,
    )


def model_of(name: str, **changes: Any) -> tuple[Decoder, PagedAttentionCache]:
    """Return a tiny model and a cache of one block."""
    from quire.kernels.triton.kernel_set import TritonKernels  # once the device is known

    with (
        model_without_files(name, is_tiny=True, **changes) as directory,
        mock.patch.object(loading, "kernel_set", return_value=TritonKernels()),
    ):
        options = loading.WeightOptions(kernels="triton")
        model = loading.load_decoder(Path(directory), read_model_config(Path(directory)), options=options)
    model.reserve(MOST_TOKENS)
    config = model.config
    metadata = PagedAttentionCacheMetaData.for_layers(
        config.kv_layers, page_size=BLOCK_SIZE, dtype=model.dtype, num_pages=1
    )
    return model, PagedAttentionCache.init_cache(None, metadata)


def measure(name: str, num_decodes: int, num_tokens: int) -> tuple[float, float]:
    """Return the seconds of a step whose kernels are asked for one by one, and of a captured one."""
    model, cache = model_of(name, num_hidden_layers=CONFIGS[name]["num_hidden_layers"])
    token_ids = np.zeros(num_decodes + num_tokens, dtype=np.int64)
    rows = np.arange(num_decodes + 1)

    def ask_one_by_one() -> None:
        hidden = model.forward(torch.from_numpy(token_ids), cache.views, batch_of(num_decodes, num_tokens))
        model.logits(hidden[torch.from_numpy(rows)])

    graphs = graphs_of(model, cache, Captures())

    def ask_for_captured() -> None:
        graphs.logits(token_ids, batch_of(num_decodes, num_tokens), rows)

    both = ask_one_by_one, ask_for_captured
    with compile_only(usable_cores()):  # ends when all are compiled
        for ask in both:
            ask()
    with as_if_launched():
        one_by_one, captured = (least_seconds(ask, REPEATS) for ask in both)
    return one_by_one, captured


def print_launches(name: str, num_decodes: int, num_tokens: int) -> None:
    """Print what a step with a chunk costs the host."""
    one_by_one, captured = measure(name, num_decodes, num_tokens)
    print(
        f"{name}: {one_by_one * 1e3:.2f} ms of the host one by one, {captured * 1e3:.2f} ms captured, "
        f"{captured / one_by_one:.2f}",
        flush=True,
    )


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Stand for what compiles kernels beside `as_if_launched`, which does."""
    from quire.kernels.triton.kernel_set import TritonKernels

    with mock.patch.object(TritonKernels, "compiles_only", new=True):
        yield


def start_seconds(name: str) -> float:
    """Return the seconds of all steps before the first request, whose kernels are compiled."""
    model, cache = model_of(name, num_hidden_layers=CONFIGS[name]["num_hidden_layers"])
    limits = StepLimits(MAX_NUM_SEQS, MOST_TOKENS, MAX_MODEL_LEN, 0)

    def make_up_steps() -> None:
        runner = ModelRunner(
            model,
            [cache],
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            capture=Captures().capture,
        )
        with mock.patch.object(runner, "compile_only", compiling):
            profile_run(runner, model.config.vocab_size, limits)

    with as_if_launched():  # ends when all kernels are compiled
        make_up_steps()
    with as_if_launched():
        return least_seconds(make_up_steps, REPEATS_OF_START)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    parser.add_argument("--num-tokens", type=int, default=200, help="of the chunk; default: 200")
    parser.add_argument("--num-decodes", type=int, default=64, help="beside it; default: 64")
    parser.add_argument("--num-steps", type=int, default=2_500, help="with requests; default: 2500")
    options = parser.parse_args()
    driver.set_active(Hopper())
    device.kernel_device = functools.partial(torch.device, "cpu")
    with torch.inference_mode():
        if "launches" in options.measure:
            for name in CONFIGS:
                print_launches(name, options.num_decodes, options.num_tokens)
        if "start" in options.measure:
            seconds = start_seconds("Qwen3-0.6B")
            print(f"Qwen3-0.6B: {seconds:.2f} s of the host before the first request", flush=True)
        if "replays" in options.measure:
            print_replays("documents", 64, options.num_steps)
            print_replays("dialogues", 16, options.num_steps)


if __name__ == "__main__":
    main()
