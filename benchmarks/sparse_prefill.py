"""Time of a long prompt with dense and with sparse attention, and what sparse attention does to answers.

Times are to the first token of one prompt of random tokens, in steps of 512; without --model the model is
that of the comparison with other engines: random weights, whose attention is spread evenly, so that
xattention has to keep most keys. Rounds of all modes alternate, and the best of each counts. Answers are the
built-in model's on its held-out retrieval prompts of 1,400 tokens, with what trishape retains scaled down.

    python benchmarks/sparse_prefill.py [--model DIRECTORY] [--tokens 8192] [--rounds 2] [--prompts 60]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import numpy as np
from eval_cases import eval_cases
from random_model import random_model

from quire import LLM, SamplingParams, SparseAttentionConfig
from quire.cli.commands.evaluate import Case

CHUNK = 512  # tokens
FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
MODES: dict[str, SparseAttentionConfig | None] = {
    "dense": None,
    "trishape": SparseAttentionConfig(),
    "xattention, threshold 0.8": SparseAttentionConfig(mode="xattention"),
    "xattention, threshold 0.5": SparseAttentionConfig(mode="xattention", xattention_threshold=0.5),
}
SMALL = {"num_retained_start_tokens_in_cache": 64, "num_retained_recent_tokens_in_cache": 448}


def engine(model: str, config: SparseAttentionConfig | None, **options: Any) -> LLM:
    """Return an engine without a prefix cache."""
    if config is not None:
        options |= {"use_sparse_attention": True, "sparse_attention_config": config}
    return LLM(model, max_num_batched_tokens=CHUNK, enable_prefix_caching=False, **options)


def seconds_to_first_token(model: str, config: SparseAttentionConfig | None, num_tokens: int) -> float:
    """Return the time of one prompt, after a short one has warmed up the engine."""
    one = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = np.random.default_rng(0).integers(FIRST_ID, END_ID, num_tokens).tolist()
    num_blocks = -(-(num_tokens + 1) // 16) + 1
    with engine(model, config, num_kv_blocks=num_blocks, watermark=0.0) as llm:
        llm.generate([prompt[: 2 * CHUNK]], one)
        started = time.perf_counter()
        llm.generate([prompt], one)
        return time.perf_counter() - started


def answers(config: SparseAttentionConfig | None, cases: list[Case]) -> list[str]:
    """Return the built-in model's greedy answers."""
    if config is not None:
        config = dataclasses.replace(config, **SMALL)
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    with engine("mini", config) as llm:
        outputs = llm.chat([case.messages for case in cases], greedy)
        return [output.outputs[0].text.strip() for output in outputs]


def report(model: str, num_tokens: int, rounds: int, num_prompts: int) -> None:
    """Measure and print the table."""
    times: dict[str, float] = dict.fromkeys(MODES, float("inf"))
    for _ in range(rounds):
        for mode, config in MODES.items():
            times[mode] = min(times[mode], seconds_to_first_token(model, config, num_tokens))
    cases = eval_cases("retrieval-1400", num_prompts)
    texts = {mode: answers(config, cases) for mode, config in MODES.items()}
    print(f"| attention | {num_tokens} tokens, s | speed-up | exact match | same answer as dense |")
    print("|---|---|---|---|---|")
    for mode, seconds in times.items():
        right = sum(text == case.answer for text, case in zip(texts[mode], cases, strict=True))
        same = sum(text == dense for text, dense in zip(texts[mode], texts["dense"], strict=True))
        print(
            f"| {mode} | {seconds:.1f} | {times['dense'] / seconds:.2f} | {right / len(cases):.0%} "
            f"| {same / len(cases):.0%} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a model's directory (default: random weights)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default: 8192)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the best counts (default: 2)")
    parser.add_argument("--prompts", type=int, default=60, help="retrieval prompts (default: 60)")
    options = parser.parse_args()
    with random_model(options.model) as model:
        report(model, options.tokens, options.rounds, options.prompts)


if __name__ == "__main__":
    main()
