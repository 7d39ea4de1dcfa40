"""Tokens per second of one engine on the built-in model, with 1 and with 16 requests at once.

Every request has its own prompt of the same length and makes the same number of tokens; end-of-sequence is
ignored so that each run does equal work. The best of several rounds is reported: the machine may be shared.

    python benchmarks/throughput.py [--model mini] [--output-tokens 128] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.request_output import RequestMetrics
from quire.sampling_params import SamplingParams

CONCURRENCY = (1, 16)
PROMPT_TOKENS = 64


async def one_request(llm: AsyncLLM, number: int, sampling: SamplingParams) -> RequestMetrics:
    """Send a prompt that no other request shares and return the finished request's times."""
    vocabulary = llm.info.vocab_size - 256
    prompt = [256 + (number * 7919 + position * 104729) % vocabulary for position in range(PROMPT_TOKENS)]
    async for output in llm.generate(prompt, sampling):
        last = output
    assert last.metrics is not None
    return last.metrics


async def one_round(
    llm: AsyncLLM, first: int, concurrency: int, sampling: SamplingParams
) -> dict[str, float]:
    """Run `concurrency` requests at once; return rates and times."""
    started = time.perf_counter()
    numbers = range(first, first + concurrency)
    metrics = await asyncio.gather(*(one_request(llm, number, sampling) for number in numbers))
    seconds = time.perf_counter() - started
    return {
        "output_tokens_per_second": sum(entry.num_output_tokens for entry in metrics) / seconds,
        "mean_time_to_first_token": sum(entry.time_to_first_token for entry in metrics) / concurrency,
        "seconds": seconds,
    }


async def measure(model: str, output_tokens: int, rounds: int) -> dict[int, dict[str, float]]:
    """Return the best round for each concurrency."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    llm = AsyncLLM(EngineConfig(model=model))
    best: dict[int, dict[str, float]] = {}
    try:
        await llm.wait_until_ready()
        await one_round(llm, 0, max(CONCURRENCY), sampling)  # warms up
        first = max(CONCURRENCY)
        for concurrency in CONCURRENCY:
            results = []
            for _ in range(rounds):
                results.append(await one_round(llm, first, concurrency, sampling))
                first += concurrency
            best[concurrency] = max(results, key=lambda result: result["output_tokens_per_second"])
    finally:
        await llm.shutdown()
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini", help="model to run (default: mini)")
    parser.add_argument("--output-tokens", type=int, default=128, help="per request (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each; the best counts (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    best = asyncio.run(measure(options.model, options.output_tokens, options.rounds))
    if options.json:
        print(json.dumps(best))
        return
    print(
        f"{options.model}: {PROMPT_TOKENS} prompt tokens, {options.output_tokens} output tokens per request"
    )
    for concurrency, result in best.items():
        print(
            f"{concurrency:4} at once: {result['output_tokens_per_second']:9,.0f} output tokens/s, "
            f"time to first token {result['mean_time_to_first_token'] * 1000:7.1f} ms"
        )


if __name__ == "__main__":
    main()
