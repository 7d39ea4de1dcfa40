"""What cache eviction costs in answers and gains in speed.

- Quality: exact match of the built-in model on its held-out retrieval prompts of 1,400 tokens, whose question
  comes last, by scores and by the share of the mean prompt that is kept. What KVCrush retains is part of the
  share: `max_cache_size` is smaller by it.
- Speed: median time of a decode step of requests at a context, held to a budget, against full KV; and against
  full KV of prompts as long as the budget, from which the cost of scores and eviction follows.

    python benchmarks/cache_eviction.py quality [--prompts 60]
    python benchmarks/cache_eviction.py speed [--model DIR] [--requests 16] [--context 4000] [--budget 672]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from random_model import random_model

from quire import LLM, AggregationMode, CacheEvictionConfig, SamplingParams
from quire.config import KVCrushConfig
from quire.engine.core import EngineCore
from quire.models.checkpoints.hub import resolve_model

BLOCK_SIZE = 16
RETAINED = 8  # blocks, of KVCrush
SHARES = {"1/4": 0.25, "3/8": 0.375, "1/2": 0.5, "3/4": 0.75}
MODES = {
    "sum": (AggregationMode.SUM, 0),
    "sum, KVCrush": (AggregationMode.SUM, RETAINED),
    "norm_sum": (AggregationMode.NORM_SUM, 0),
    "norm_sum, KVCrush": (AggregationMode.NORM_SUM, RETAINED),
    "adaptive_rkv": (AggregationMode.ADAPTIVE_RKV, 0),
}


def eviction(budget: int, mode: AggregationMode, retained: int) -> dict[str, Any]:
    """Return an engine's options for holding sequences to `budget` tokens."""
    config = CacheEvictionConfig(
        max_cache_size=budget - retained * BLOCK_SIZE,
        aggregation_mode=mode,
        kvcrush_config=KVCrushConfig(budget=retained) if retained else None,
    )
    return {"use_cache_eviction": True, "cache_eviction_config": config}


def retrieval_cases(count: int) -> list[Any]:
    """Return the first held-out retrieval prompts of 1,400 tokens."""
    lines = (Path(resolve_model("mini")) / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case["task"] == "retrieval-1400"][:count]


def exact_match(cases: list[Any], options: dict[str, Any]) -> tuple[float, float]:
    """Return the share of right greedy answers, and the mean number of prompt tokens."""
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    with LLM("mini", block_size=BLOCK_SIZE, enable_prefix_caching=False, **options) as llm:
        outputs = llm.chat([case["messages"] for case in cases], greedy)
    right = [
        output.outputs[0].text.strip() == case["answer"] for output, case in zip(outputs, cases, strict=True)
    ]
    return statistics.mean(right), statistics.mean(len(output.prompt_token_ids) for output in outputs)


def quality(options: argparse.Namespace) -> None:
    """Print exact match by mode and budget."""
    cases = retrieval_cases(options.prompts)
    full, mean_tokens = exact_match(cases, {})
    budgets = {name: int(mean_tokens * share) // BLOCK_SIZE * BLOCK_SIZE for name, share in SHARES.items()}
    print(f"{len(cases)} prompts of {mean_tokens:.0f} tokens on average; full KV: {full:.1%}\n")
    print("| scores | " + " | ".join(f"{name} ({budget})" for name, budget in budgets.items()) + " |")
    print("|---" * (len(budgets) + 1) + "|")
    for name, mode in MODES.items():
        found = [exact_match(cases, eviction(budget, *mode))[0] for budget in budgets.values()]
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in found) + " |", flush=True)


def decode_seconds(model: str, count: int, length: int, steps: int, options: dict[str, Any]) -> float:
    """Return the median seconds of a step that decodes `count` requests with prompts of `length` tokens."""
    seconds: list[float] = []
    step = EngineCore.step

    def timed(core: EngineCore, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = step(core, *args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return result

    num_blocks = count * (-(-(length + 8 * steps) // BLOCK_SIZE) + 4)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    EngineCore.step = timed  # type: ignore[method-assign]
    try:
        with LLM(model, num_kv_blocks=num_blocks, enable_prefix_caching=False, **options) as llm:
            vocabulary = llm.info.vocab_size - 1000
            prompts = [
                [1000 + (index * 7919 + place * 104729) % vocabulary for place in range(length)]
                for index in range(count)
            ]
            llm.generate(prompts, params)
    finally:
        EngineCore.step = step  # type: ignore[method-assign]
    return statistics.median(seconds[-steps // 2 :])


def speed(options: argparse.Namespace, model: str) -> None:
    """Print tokens per second, and the share of scores and eviction."""
    held = eviction(options.budget, AggregationMode.NORM_SUM, 0)
    kinds = {
        "full KV": (options.context, {}),
        "held": (options.context, held),
        "short": (options.budget, {}),
    }
    seconds = {
        name: decode_seconds(model, options.requests, length, options.steps, chosen)
        for name, (length, chosen) in kinds.items()
    }
    for name, value in seconds.items():
        print(f"{name:10}{options.requests / value:10.1f} tokens/s")
    print(f"held / full KV {seconds['full KV'] / seconds['held']:.2f}")
    print(f"scores and eviction {1 - seconds['short'] / seconds['held']:.1%} of a step")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("quality", "speed"))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--model", default="", help="directory of the model; made if not given")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=4000, help="prompt tokens of each request")
    parser.add_argument("--budget", type=int, default=672, help="tokens that a request keeps")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    if options.part == "quality":
        quality(options)
    else:
        with random_model(options.model) as model:
            speed(options, model)


if __name__ == "__main__":
    main()
