"""What cache eviction costs in answers and gains in speed.

- Quality: exact match of the built-in model on its held-out retrieval prompts of 1,400 tokens, whose question
  comes last, by scores and by the share of the mean prompt that is kept. What KVCrush retains is part of the
  share: `max_cache_size` is smaller by it.
- Speed: decode steps of requests at a context, held to a budget, against full KV; and against full KV of
  contexts as long as the budget, from which the cost of scores and eviction follows. Three engines take
  turns, for as many steps as a request decodes between two evictions; figures are medians over the rounds.

    python benchmarks/cache_eviction.py quality [--prompts 60] [--questions name|mixed] [--svg FILE]
    python benchmarks/cache_eviction.py speed [--model DIR] [--requests 16] [--context 4000] [--budget 672]

With the default sizes, `speed` needs 17 GB of memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from eval_cases import eval_cases
from line_chart import Panel, line_chart
from random_model import random_model

from quire import (
    LLM,
    AggregationMode,
    CacheEvictionConfig,
    EngineConfig,
    KVCrushConfig,
    SamplingParams,
    SchedulerConfig,
    ScorePooling,
)
from quire.cli.commands.evaluate import Case
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.scheduling.outputs import SchedulerStats

BLOCK_SIZE = 16
CHUNK = 512  # tokens of a prompt in one step
FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
RETAINED = 8  # blocks, of KVCrush
SHARES = (25.0, 37.5, 50.0, 62.5, 75.0)  # percent of the mean prompt
MODES: dict[str, dict[str, Any]] = {
    "sum": {"aggregation_mode": AggregationMode.SUM},
    "norm_sum": {},
    "adaptive_rkv": {"aggregation_mode": AggregationMode.ADAPTIVE_RKV},
    "norm_sum, KVCrush": {"kvcrush_config": KVCrushConfig(budget=RETAINED)},
    "norm_sum, rotation": {"apply_rotation": True},
}


def eviction(budget: int, **fields: Any) -> dict[str, Any]:
    """Return an engine's options for holding sequences to `budget` tokens."""
    retained = RETAINED * BLOCK_SIZE if "kvcrush_config" in fields else 0
    config = CacheEvictionConfig(max_cache_size=budget - retained, **fields)
    return {"use_cache_eviction": True, "cache_eviction_config": config}


def retrieval_cases(count: int, questions: str) -> list[Case]:
    """Return the first held-out retrieval prompts of 1,400 tokens.

    Args:
        count: of prompts, if there are so many.
        questions: mixed, as they are; or name, so that all consist of the name asked for.
    """
    cases = eval_cases("retrieval-1400", count)
    for case in cases if questions == "name" else ():
        message = case.messages[-1]
        text, _question = message["content"].rsplit("\n", 1)
        name = case.answer.split()[0].rstrip(":")
        message["content"] = f"{text}\n{name}?"
    return cases


def exact_match(cases: list[Case], options: dict[str, Any]) -> tuple[float, float]:
    """Return the percentage of right greedy answers, and the mean number of prompt tokens."""
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    with LLM("mini", block_size=BLOCK_SIZE, enable_prefix_caching=False, **options) as llm:
        outputs = llm.chat([case.messages for case in cases], greedy)
    right = [
        output.outputs[0].text.strip() == case.answer for output, case in zip(outputs, cases, strict=True)
    ]
    tokens = [len(output.prompt_token_ids) for output in outputs]
    return 100 * statistics.mean(right), statistics.mean(tokens)


def quality(options: argparse.Namespace) -> None:
    """Print exact match by pooling, mode and budget, and draw it."""
    cases = retrieval_cases(options.prompts, options.questions)
    full, mean_tokens = exact_match(cases, {})
    budgets = {share: int(mean_tokens * share / 100) // BLOCK_SIZE * BLOCK_SIZE for share in SHARES}
    print(f"{len(cases)} prompts of {mean_tokens:.0f} tokens on average; full KV: {full:.0f} %\n")
    print(
        "| pooling | scores | "
        + " | ".join(f"{share:g} % ({size})" for share, size in budgets.items())
        + " |"
    )
    print("|---" * (len(budgets) + 2) + "|")
    panels = []
    for pooling in ScorePooling:
        curves = {}
        for name, fields in MODES.items():
            found = [
                exact_match(cases, eviction(budget, score_pooling=pooling, **fields))[0]
                for budget in budgets.values()
            ]
            curves[name] = [*zip(SHARES, found, strict=True), (100.0, full)]
            print(
                f"| {pooling} | {name} | " + " | ".join(f"{match:.0f} %" for match in found) + " |",
                flush=True,
            )
        panels.append(Panel(f"score_pooling = {pooling}", curves))
    if options.svg:
        chart = line_chart(panels, [*SHARES, 100.0], "tokens kept, % of the prompt", "exact match, %")
        Path(options.svg).write_text(chart, encoding="utf-8")


class Decoding:
    """An engine whose requests have computed their prompts and go on decoding, all in each step.

    Args:
        model: directory of the model.
        count: requests.
        length: tokens of each prompt.
        held: tokens that a request keeps in the end, but for those decoded beside other prompts.
        steps: the most that will be decoded once all prompts are computed.
        options: of the scheduler.
    """

    def __init__(
        self, model: str, count: int, length: int, *, held: int, steps: int, options: dict[str, Any]
    ) -> None:
        # Prompts are computed one after the other, while the requests before them decode.
        num_prompt_steps = count * (-(-length // CHUNK) + 1)
        num_output = num_prompt_steps + steps
        num_blocks = (count * (held + num_prompt_steps + BLOCK_SIZE) + length) // BLOCK_SIZE
        scheduler = SchedulerConfig(
            num_kv_blocks=num_blocks, max_num_batched_tokens=CHUNK, enable_prefix_caching=False, **options
        )
        self._core = EngineCore(EngineConfig(model=model, scheduler=scheduler), Path(model))
        waiting = {f"request-{index}" for index in range(count)}
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        for index, name in enumerate(sorted(waiting)):
            ids = np.random.default_rng(index).integers(FIRST_ID, END_ID, length).tolist()
            self._core.add(EngineCoreRequest([name], [0], ids, params))
        while waiting:
            waiting -= {output.request_id for output in self._core.step()[0] if output.new_token_ids}

    def seconds(self, steps: int) -> float:
        """Return the mean time of the next steps."""
        started = time.perf_counter()
        for _ in range(steps):
            self._core.step()
        return (time.perf_counter() - started) / steps

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counts."""
        return self._core.stats()

    def close(self) -> None:
        """End the requests and the engine."""
        self._core.shutdown()


def speed(options: argparse.Namespace, model: str) -> None:
    """Print tokens per second, and the share of scores and eviction."""
    steps = options.rounds * BLOCK_SIZE
    whole, part = options.context + steps, options.budget + BLOCK_SIZE
    sizes: dict[str, tuple[int, int, dict[str, Any]]] = {
        "full KV": (options.context, whole, {}),
        "held": (options.context, part, eviction(options.budget)),
        "short": (options.budget - steps // 2, part + steps, {}),
    }
    engines = {
        name: Decoding(model, options.requests, length, held=held, steps=steps, options=chosen)
        for name, (length, held, chosen) in sizes.items()
    }
    rounds = [
        {name: engine.seconds(BLOCK_SIZE) for name, engine in engines.items()} for _ in range(options.rounds)
    ]
    for name, engine in engines.items():
        rate = options.requests / statistics.median(found[name] for found in rounds)
        print(f"{name:10}{rate:10.1f} tokens/s, {engine.stats().num_evicted_blocks} blocks evicted")
        engine.close()
    gain = statistics.median(found["full KV"] / found["held"] for found in rounds)
    own = statistics.median(1 - found["short"] / found["held"] for found in rounds)
    print(f"held / full KV {gain:.2f}")
    print(f"scores and eviction {own:.1%} of a step")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("quality", "speed"))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--questions", choices=("name", "mixed"), default="name")
    parser.add_argument("--svg", default="", help="file for a picture of exact match by budget")
    parser.add_argument("--model", default="", help="directory of the model; made if not given")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=4000, help="prompt tokens of each request")
    parser.add_argument("--budget", type=int, default=672, help="tokens that a request keeps")
    parser.add_argument("--rounds", type=int, default=8, help="of 16 steps of each engine")
    options = parser.parse_args()
    if options.part == "quality":
        quality(options)
    else:
        with random_model(options.model) as model:
            speed(options, model)


if __name__ == "__main__":
    main()
