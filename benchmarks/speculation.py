"""Speed-up by copied drafts on the tasks of the built-in model, with 1 and 8 concurrent requests.

The held-out prompts of a task are answered greedily without drafts, with those of the methods ngram and
suffix, and with those of suffix when all questions have been answered once before ("again"); the answers must
be equal. Rounds of all alternate, and the best of each counts, because the machine may be shared. Tokens per
step are those of one request while decoding.

    python benchmarks/speculation.py [--task copy --task retrieval-200] [--prompts 32] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from typing import Any

from eval_cases import eval_cases

from quire import LLM
from quire.sampling_params import SamplingParams

TASKS = ("copy", "reverse", "retrieval-200", "retrieval-600", "qa")
CONCURRENCY = (1, 8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@dataclasses.dataclass(frozen=True)
class Round:
    """One pass over the prompts."""

    seconds: float
    answers: list[list[int]]
    num_accepted: int  # drafts


def one_round(llm: LLM, messages: list[Any], salt: str) -> Round:
    """Answer all prompts; outputs of another `salt` are not drafted from."""
    llm.reset_prefix_cache()
    before = llm.stats().num_accepted_tokens
    started = time.perf_counter()
    outputs = llm.chat(messages, GREEDY, cache_salt=salt)
    seconds = time.perf_counter() - started
    answers = [output.outputs[0].token_ids for output in outputs]
    return Round(seconds, answers, llm.stats().num_accepted_tokens - before)


def measure(task: str, concurrency: int, num_prompts: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the table for a task: ngram, suffix, and suffix again."""
    messages = [case.messages for case in eval_cases(task, num_prompts)]
    engines = {
        method: LLM("mini", max_num_seqs=concurrency, speculative_method=method, ngram_min=1)
        for method in ("none", "ngram", "suffix")
    }
    found: dict[str, list[Round]] = defaultdict(list)
    try:
        for number in range(rounds + 1):
            for method, llm in engines.items():
                found[method].append(one_round(llm, messages, str(number)))
            found["suffix, again"].append(one_round(engines["suffix"], messages, str(number)))
    finally:
        for llm in engines.values():
            llm.shutdown()
    warm = {method: passes[1:] for method, passes in found.items()}
    best = {method: min(took.seconds for took in passes) for method, passes in warm.items()}
    answers = found["none"][0].answers
    num_tokens = sum(map(len, answers))
    return [
        {
            "task": task,
            "concurrency": concurrency,
            "method": method,
            "tokens": num_tokens,
            "tokens_per_step": num_tokens / (num_tokens - passes[-1].num_accepted),
            "speed_up": best["none"] / best[method],
            "equal": all(took.answers == answers for took in passes),
        }
        for method, passes in found.items()
        if method != "none"
    ]


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
        row
        for task in options.task or TASKS
        for concurrency in CONCURRENCY
        for row in measure(task, concurrency, options.prompts, options.rounds)
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("| task | concurrent requests | drafts | tokens per step | speed-up | same tokens |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['task']} | {row['concurrency']} | {row['method']} | {row['tokens_per_step']:.2f} "
            f"| {row['speed_up']:.2f} | {'yes' if row['equal'] else 'NO'} |"
        )


if __name__ == "__main__":
    main()
