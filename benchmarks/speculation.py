"""Speed-up by n-gram drafts on the tasks of the built-in model, with 1 and 8 concurrent requests.

The held-out prompts of a task are answered greedily, without and with drafts; the answers must be equal.
Rounds of both alternate, and the best of each counts, because the machine may be shared. Tokens per step are
those of one request while decoding.

    python benchmarks/speculation.py [--task copy --task retrieval-200] [--prompts 32] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from eval_cases import eval_cases

from quire import LLM
from quire.sampling_params import SamplingParams

TASKS = ("copy", "reverse", "retrieval-200", "retrieval-600", "qa")
CONCURRENCY = (1, 8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def one_round(llm: LLM, messages: list[Any]) -> tuple[float, list[list[int]], int]:
    """Return seconds, the tokens of the answers, and the number of accepted drafts."""
    llm.reset_prefix_cache()
    before = llm.stats().num_accepted_tokens
    started = time.perf_counter()
    outputs = llm.chat(messages, GREEDY)
    seconds = time.perf_counter() - started
    answers = [output.outputs[0].token_ids for output in outputs]
    return seconds, answers, llm.stats().num_accepted_tokens - before


def measure(task: str, concurrency: int, num_prompts: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one row of the table."""
    messages = [case.messages for case in eval_cases(task, num_prompts)]
    engines = [
        LLM("mini", max_num_seqs=concurrency, speculative_method=method, ngram_min=1)
        for method in ("none", "ngram")
    ]
    try:
        for llm in engines:
            one_round(llm, messages)  # warms up
        results = [[one_round(llm, messages) for llm in engines] for _ in range(rounds)]
    finally:
        for llm in engines:
            llm.shutdown()
    answers, accepted = results[0][1][1:]
    num_tokens = sum(map(len, answers))
    plain_seconds, seconds = (min(result[index][0] for result in results) for index in range(2))
    return {
        "task": task,
        "concurrency": concurrency,
        "tokens": num_tokens,
        "tokens_per_step": num_tokens / (num_tokens - accepted),
        "speed_up": plain_seconds / seconds,
        "equal": all(found[1] == answers for result in results for found in result),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", action="append", help=f"one of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per task (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best counts (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [
        measure(task, concurrency, options.prompts, options.rounds)
        for task in options.task or TASKS
        for concurrency in CONCURRENCY
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("| task | concurrent requests | answer tokens | tokens per step | speed-up | same tokens |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['task']} | {row['concurrency']} | {row['tokens']} | {row['tokens_per_step']:.2f} "
            f"| {row['speed_up']:.2f} | {'yes' if row['equal'] else 'NO'} |"
        )


if __name__ == "__main__":
    main()
