"""Requests of random tokens with the lengths of known datasets.

Only mean lengths are published, so the rest is assumed: lengths have a lognormal distribution with
`ASSUMED_SIGMA`, and prompt and output lengths are independent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cli.bench_options import DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, WorkloadConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

ASSUMED_SIGMA = 1.0
"""Standard deviation of a length's logarithm: the median is 0.61, the 90th percentile 2.2 times the mean."""

ASSUMED_REQUESTS_PER_PREFIX = 16
"""Average number of requests of the mooncake workload that share a prefix."""

# Random streams: drawing more numbers from one does not change the others.
LENGTHS, TOKENS, PREFIXES, WARMUP, ARRIVALS = range(5)


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedLengths:
    """Published lengths of a dataset, in tokens.

    Args:
        mean_input: mean prompt length.
        mean_output: mean output length.
        shared_fraction: fraction of a prompt, from its start, that it shares with others.
        shared_block: shared prefixes are multiples of this length.
    """

    mean_input: float
    mean_output: float
    shared_fraction: float = 0.0
    shared_block: int = 1


PUBLISHED = {
    # Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    # SOSP 2023: the means in the legend of figure 11 (section 6.1).
    "sharegpt": PublishedLengths(161.31, 337.99),
    "alpaca": PublishedLengths(19.31, 58.45),
    # Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079,
    # sections 4.1 and 4.2: the means, the block size of the hash ids, and the hit ratio of 50 % that a large
    # cache reaches; that it is half of each prompt is assumed.
    "mooncake": PublishedLengths(7590, 182, shared_fraction=0.5, shared_block=512),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RequestShape:
    """Lengths of one request in tokens; its prompt starts with `prefix_len` tokens of prefix `prefix`."""

    input_len: int
    output_len: int
    prefix: int = 0
    prefix_len: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and the number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a benchmark.

    Args:
        requests: to measure, in the order of arrival.
        warmup: to send first; their prompts share no prefix with `requests`.
        num_clipped: number of requests that were shortened to fit.
        reusable_tokens: prompt tokens in a prefix shared with an earlier prompt.
    """

    requests: list[BenchRequest]
    warmup: list[BenchRequest]
    num_clipped: int
    reusable_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the number of requests and their mean lengths in tokens."""
        inputs = [len(request.prompt_token_ids) for request in self.requests]
        outputs = [request.output_len for request in self.requests]
        return {
            "num_requests": len(self.requests),
            "num_clipped": self.num_clipped,
            "mean_input_len": sum(inputs) / len(inputs),
            "mean_output_len": sum(outputs) / len(outputs),
            "reusable_prompt_share": self.reusable_tokens / sum(inputs),
        }


def build_workload(config: WorkloadConfig, vocabulary: np.ndarray, max_model_len: int | None) -> Workload:
    """Draw the requests that `config` asks for.

    Args:
        vocabulary: token ids [n] that prompts consist of; see `regular_token_ids`.
        max_model_len: maximum number of tokens of a prompt and its output together; None if unknown.

    Raises:
        ConfigError: the lengths of dataset random do not fit.
    """
    if config.dataset == "random":
        shapes = equal_shapes(config, max_model_len)
        num_clipped = 0
    else:
        drawn = sample_shapes(config)
        shapes = [clip_shape(shape, max_model_len) for shape in drawn]
        num_clipped = sum(shape != original for shape, original in zip(shapes, drawn, strict=True))
    return Workload(
        requests=measured_requests(shapes, vocabulary, config.seed),
        warmup=warmup_requests(islice(cycle(shapes), config.warmup), vocabulary, config.seed),
        num_clipped=num_clipped,
        reusable_tokens=reusable_tokens(shapes),
    )


def equal_shapes(config: WorkloadConfig, max_model_len: int | None) -> list[RequestShape]:
    """Return equal shapes, for dataset random.

    Raises:
        ConfigError: they do not fit `max_model_len`.
    """
    prefix_len = config.prefix_len or 0
    input_len = prefix_len + (config.input_len or DEFAULT_INPUT_LEN)
    output_len = config.output_len or DEFAULT_OUTPUT_LEN
    require_fit(input_len, output_len, max_model_len)
    return [RequestShape(input_len, output_len, prefix_len=prefix_len)] * config.num_prompts


def require_fit(input_len: int, output_len: int, max_model_len: int | None) -> None:
    """Raise `ConfigError` if prompt and output together have more than `max_model_len` tokens."""
    if max_model_len is not None and input_len + output_len > max_model_len:
        raise ConfigError(
            f"a prompt of {input_len:,} and an output of {output_len:,} tokens make "
            f"{input_len + output_len:,}; the limit is {max_model_len:,}: lower --input-len or --output-len, "
            "or raise --max-model-len if the model allows"
        )


def sample_shapes(config: WorkloadConfig) -> list[RequestShape]:
    """Draw shapes with the published means of a dataset, times `config.scale`."""
    published = PUBLISHED[config.dataset]
    scale = 1.0 if config.scale is None else config.scale
    generator = np.random.default_rng([config.seed, LENGTHS])
    count = config.num_prompts
    inputs = lognormal_lengths(generator, published.mean_input * scale, count)
    outputs = lognormal_lengths(generator, published.mean_output * scale, count)
    if not published.shared_fraction:
        return [RequestShape(*lengths) for lengths in zip(inputs, outputs, strict=True)]
    prefixes = generator.integers(max(1, count // ASSUMED_REQUESTS_PER_PREFIX), size=count).tolist()
    block = max(1, round(published.shared_block * scale))
    return [
        RequestShape(
            input_len, output_len, prefix, round(input_len * published.shared_fraction / block) * block
        )
        for input_len, output_len, prefix in zip(inputs, outputs, prefixes, strict=True)
    ]


def lognormal_lengths(generator: np.random.Generator, mean: float, count: int) -> list[int]:
    """Draw lengths of at least one token from a lognormal distribution of this mean."""
    location = math.log(mean) - ASSUMED_SIGMA**2 / 2
    drawn = generator.lognormal(location, ASSUMED_SIGMA, count)
    lengths: list[int] = np.maximum(1, np.rint(drawn)).astype(np.int64).tolist()
    return lengths


def clip_shape(shape: RequestShape, max_model_len: int | None) -> RequestShape:
    """Return `shape`, scaled down if it has more than `max_model_len` tokens."""
    total = shape.input_len + shape.output_len
    if max_model_len is None or total <= max_model_len:
        return shape
    input_len = min(max(1, shape.input_len * max_model_len // total), max_model_len - 1)
    return dataclasses.replace(
        shape,
        input_len=input_len,
        output_len=max_model_len - input_len,
        prefix_len=min(shape.prefix_len, input_len),
    )


def reusable_tokens(shapes: Sequence[RequestShape]) -> int:
    """Return the number of prompt tokens in prefixes shared with an earlier prompt."""
    longest: dict[int, int] = {}
    reusable = 0
    for shape in shapes:
        known = longest.get(shape.prefix, 0)
        reusable += min(known, shape.prefix_len)
        longest[shape.prefix] = max(known, shape.prefix_len)
    return reusable


def regular_token_ids(tokenizer: Tokenizer, vocab_size: int | None = None) -> np.ndarray:
    """Return the ids [n] of a tokenizer's tokens that are not special, in ascending order.

    Args:
        vocab_size: the model's vocabulary size, if known; larger ids are left out.
    """
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    ids = sorted(set(tokenizer.backend.get_vocab(with_added_tokens=True).values()) - special)
    return np.array([id_ for id_ in ids if vocab_size is None or id_ < vocab_size], dtype=np.int64)


def measured_requests(
    shapes: Sequence[RequestShape], vocabulary: np.ndarray, seed: int
) -> list[BenchRequest]:
    """Fill shapes with random tokens; equal prefixes get equal tokens."""
    generator = np.random.default_rng([seed, TOKENS])
    longest: dict[int, int] = {}
    for shape in shapes:
        longest[shape.prefix] = max(longest.get(shape.prefix, 0), shape.prefix_len)
    prefixes = {
        prefix: np.random.default_rng([seed, PREFIXES, prefix]).choice(vocabulary, length)
        for prefix, length in longest.items()
    }
    requests = []
    for shape in shapes:
        own = generator.choice(vocabulary, shape.input_len - shape.prefix_len)
        prompt = np.concatenate([prefixes[shape.prefix][: shape.prefix_len], own])
        requests.append(BenchRequest(prompt.tolist(), shape.output_len))
    return requests


def warmup_requests(shapes: Iterable[RequestShape], vocabulary: np.ndarray, seed: int) -> list[BenchRequest]:
    """Fill shapes with random tokens that `measured_requests` does not use."""
    generator = np.random.default_rng([seed, WARMUP])
    return [
        BenchRequest(generator.choice(vocabulary, shape.input_len).tolist(), shape.output_len)
        for shape in shapes
    ]
