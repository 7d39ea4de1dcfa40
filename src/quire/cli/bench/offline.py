"""Timing of whole batches, with the engine in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.cli.bench.measurements import rates, summary
from quire.cli.bench.workload import (
    BenchRequest,
    RequestShape,
    build_workload,
    measured_requests,
    regular_token_ids,
    require_fit,
    warmup_requests,
)
from quire.cli.bench_options import LatencyConfig, WorkloadConfig
from quire.cli.console import stderr_is_terminal
from quire.cli.offline import ready_llm
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.request_output import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.front.llm import LLM


def fixed_length_sampling(num_tokens: int) -> SamplingParams:
    """Return parameters for generating exactly this many tokens, greedily."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def measure_throughput(engine: EngineConfig, config: WorkloadConfig, rounds: int) -> dict[str, Any]:
    """Run all requests of a workload at once, `rounds` times; return the results of the fastest round."""
    with ready_llm(engine) as llm:
        info = llm.info
        vocabulary = regular_token_ids(llm.get_tokenizer(), info.vocab_size)
        workload = build_workload(config, vocabulary, info.max_model_len)
        timed_batch(llm, workload.warmup)
        timed = [timed_batch(llm, workload.requests) for _ in range(rounds)]
    seconds, outputs = min(timed, key=lambda batch: batch[0])
    input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "workload": workload.as_dict(),
        "completed": len(outputs),
        "seconds": seconds,
        "rounds_seconds": [batch_seconds for batch_seconds, _ in timed],
        "input_tokens": input_tokens,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "output_tokens": output_tokens,
        **rates(len(outputs), input_tokens, output_tokens, seconds),
        "ttft_seconds": summary(
            output.metrics.time_to_first_token for output in outputs if output.metrics is not None
        ),
    }


def measure_latency(engine: EngineConfig, batch: LatencyConfig) -> dict[str, Any]:
    """Run one batch `batch.repeats` times; return a summary of the times."""
    with ready_llm(engine) as llm:
        info = llm.info
        require_fit(batch.input_len, batch.output_len, info.max_model_len)
        vocabulary = regular_token_ids(llm.get_tokenizer(), info.vocab_size)
        shapes = [RequestShape(batch.input_len, batch.output_len)] * batch.batch_size
        for _ in range(batch.warmup):
            timed_batch(llm, warmup_requests(shapes, vocabulary, batch.seed))
        requests = measured_requests(shapes, vocabulary, batch.seed)
        times = [timed_batch(llm, requests)[0] for _ in range(batch.repeats)]
    return {
        "batch_seconds": summary(times),
        "per_token_seconds": summary(seconds / batch.output_len for seconds in times),
        "fastest_seconds": min(times),
        "runs_seconds": times,
    }


def timed_batch(llm: LLM, requests: Sequence[BenchRequest]) -> tuple[float, list[RequestOutput]]:
    """Reset the prefix cache and run all requests at once; return seconds and outputs.

    Raises:
        QuireError: a request failed, or the prefix cache cannot be reset.
    """
    if not requests:
        return 0.0, []
    if not llm.reset_prefix_cache():
        raise QuireError("the prefix cache cannot be reset: KV blocks are in use, but no request is running")
    prompts = [request.prompt_token_ids for request in requests]
    params = [fixed_length_sampling(request.output_len) for request in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=stderr_is_terminal())
    seconds = time.perf_counter() - started
    for output in outputs:
        if (error := output.outputs[0].error) is not None:
            raise QuireError(error)
    return seconds, outputs
