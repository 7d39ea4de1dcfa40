"""Profile of a decode step for several numbers of requests, compared with the limits of the machine.

Every part of a step is timed: the phases of the engine, and each kind of kernel in the forward pass, summed
over the layers. Steps are computed call by call for that, not as they are recorded. The times include the
overhead of the clocks (about 0.3 us per call). The limit of a row is
the time to read its weights or KV at the given bandwidth, or for its products at the given rate, whichever is
longer; `make bench-peers` measures both rates. Logits may take less: of few requests, not all are computed.

    python benchmarks/step_profile.py MODEL [--requests 1 16] [--context 64] [--quantization int8] \\
        [--instructions avx2]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.execution.model_runner import ModelRunner
from quire.execution.sampling.sampler import Sampler
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.layers.linear import Linear
from quire.kv import PagedAttentionCacheMetaData
from quire.models.checkpoints import loading
from quire.models.decoder import Decoder
from quire.models.weights import weight_specs
from quire.scheduling import Scheduler

PHASES: tuple[tuple[type, str, str], ...] = (
    (EngineCore, "step", "whole step"),
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "update_from_output", "update_from_output"),
    (ModelRunner, "execute", "execute"),
    (AttentionBatch, "build", "  batch"),
    (Decoder, "forward", "  forward"),
    (Decoder, "logits", "  logits"),
    (Sampler, "sample", "  sample"),
)
KERNELS = (
    "rms_norm",
    "add_rms_norm",
    "apply_gate",
    "gated_activation",
    "rotary_and_write_kv",
    "paged_attention",
    "causal_conv",
    "gated_delta_rule",
    "selective_scan",
)
MATRICES = ("qkv", "project", "gates", "output", "gate_up", "down", "router", "experts")
WARM_STEPS = 4


class Clock:
    """Seconds by name, for the current step and for finished steps."""

    def __init__(self) -> None:
        self.current: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed `function`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.current[name] += time.perf_counter() - start
            if name == PHASES[0][2]:
                self.steps.append(dict(self.current))
                self.current.clear()
            return result

        return timed

    def wrap_method(self, owner: type, method: str, name: str) -> None:
        """Time a method or class method of `owner`."""
        function = owner.__dict__[method]
        if isinstance(function, classmethod):
            setattr(owner, method, classmethod(self.wrap(name, function.__func__)))
        else:
            setattr(owner, method, self.wrap(name, function))


class TimedLinear:
    """A timed dense layer."""

    def __init__(self, linear: Linear, clock: Clock, name: str) -> None:
        self._call = clock.wrap(name, linear.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Time the product."""
        return self._call(*args, **kwargs)


def wrap_kernels(decoder: Decoder, clock: Clock) -> None:
    """Time the kernels of a loaded decoder."""
    for name in KERNELS:
        setattr(decoder.kernels, name, clock.wrap(f"    {name}", getattr(decoder.kernels, name)))
    for attention, feed_forward in decoder.layers:
        for owner in (attention, feed_forward, getattr(feed_forward, "gate_up", None)):
            for name in MATRICES:
                if hasattr(owner, name) and not hasattr(getattr(owner, name), name):
                    setattr(owner, name, TimedLinear(getattr(owner, name), clock, f"    {name}"))


def limits(
    decoder: Decoder, num_requests: int, context: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return the minimum seconds of each kind of kernel in a step."""
    config = decoder.config
    weight_bytes = {"none": 2.0, "int8": 1.0, "int4": 0.5625}[options.quantization]
    sizes: dict[str, int] = Counter()
    for spec in weight_specs(config):
        if spec.layer >= 0 and spec.is_quantized:
            name = spec.field.removeprefix("attention_")
            sizes[name] += sum(math.prod(source.shape) for source in spec.sources)
    result = {}
    for name, size in sizes.items():
        seconds = max(size * weight_bytes / options.bandwidth, 2 * size * num_requests / options.rate)
        result[f"    {name}"] = seconds
    head = config.vocab_size * config.hidden_size
    result["  logits"] = max(
        head * min(weight_bytes, 2.0) / options.bandwidth, 2 * head * num_requests / options.rate
    )
    kv_dtype = config.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    cache = PagedAttentionCacheMetaData.for_layers(config.kv_layers, page_size=1, dtype=kv_dtype, num_pages=1)
    kv_bytes = cache.bytes_per_token * context * num_requests
    result["    paged_attention"] = kv_bytes / options.bandwidth
    return result


def measure(
    llm: LLM, clock: Clock, num_requests: int, options: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Yield the median seconds of each part over the decode steps of one run."""
    vocabulary = llm.info.vocab_size - 1000
    prompts = [
        [1000 + (index * 7919 + place * 104729) % vocabulary for place in range(options.context)]
        for index in range(num_requests)
    ]
    clock.steps.clear()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=options.steps, ignore_eos=True))
    steps = clock.steps[-options.steps + WARM_STEPS :]
    for name in sorted({name for step in steps for name in step}, key=_order):
        yield name, statistics.median(step.get(name, 0.0) for step in steps)


def _order(name: str) -> int:
    phases = [phase for *_, phase in PHASES]
    inner = [f"    {kind}" for kind in (*KERNELS, *MATRICES)]
    place = phases.index("  forward") + 1
    return [*phases[:place], *inner, *phases[place:]].index(name)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model to run")
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[1, 16],
        help="numbers of concurrent requests (default: 1 16)",
    )
    parser.add_argument("--context", type=int, default=64, help="prompt tokens per request (default: 64)")
    parser.add_argument("--steps", type=int, default=32, help="number of decode steps (default: 32)")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (bfloat16), int8 or int4")
    parser.add_argument("--bandwidth", type=float, default=30.5e9, help="bytes/s (default: 30.5e9)")
    parser.add_argument(
        "--rate", type=float, default=None, help="operations/s (default: 450e9, quantized 860e9)"
    )
    best = _native.instruction_set()
    parser.add_argument("--instructions", default=best, help=f"instruction set (default: {best})")
    options = parser.parse_args()
    if not _native.set_instruction_set(options.instructions):
        parser.error(f"this CPU has no {options.instructions}")
    if options.rate is None:
        options.rate = 450e9 if options.quantization == "none" else 860e9
    clock = Clock()
    decoders: list[Decoder] = []
    load = loading.load_decoder

    def load_and_keep(*args: Any, **kwargs: Any) -> Decoder:
        decoders.append(load(*args, **kwargs))
        return decoders[-1]

    loading.load_decoder = load_and_keep
    NativeKernels.capture = None  # type: ignore[assignment]
    for owner, method, name in PHASES:
        clock.wrap_method(owner, method, name)
    with LLM(
        options.model,
        dtype="bfloat16",
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        enable_prefix_caching=False,
    ) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        (decoder,) = decoders
        wrap_kernels(decoder, clock)
        for num_requests in options.requests:
            least = limits(decoder, num_requests, options.context, options)
            kind = f"{num_requests} requests, context from {options.context}"
            print(f"\n{kind}, {options.quantization}, {options.instructions}: ms per decode step")
            for name, seconds in measure(llm, clock, num_requests, options):
                share = f"{least[name] * 1e3:8.3f} {least[name] / seconds:6.0%}" if name in least else ""
                print(f"{name:26} {seconds * 1e3:8.3f}   {share}")


if __name__ == "__main__":
    main()
