"""Requests with the lengths of known workloads: drawn from published means, made of random tokens.

What is published is a mean; the spread is not, so it is assumed: lengths are lognormal with `ASSUMED_SIGMA`,
with a long tail. Prompt and output lengths are drawn independently, which is assumed too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cli.bench.config import DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, WorkloadConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

ASSUMED_SIGMA = 1.0
"""Standard deviation of a length's logarithm: the median is 0.61, the 90th percentile 2.2 times the mean."""

ASSUMED_REQUESTS_PER_PREFIX = 16
"""Requests of the mooncake workload for each distinct prefix, on the average."""

# Streams of random numbers, so that drawing more from one changes nothing in another.
LENGTHS, TOKENS, PREFIXES, WARMUP, ARRIVALS = range(5)


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedLengths:
    """What is published of a workload, in tokens.

    Args:
        mean_input: of the prompts.
        mean_output: of the outputs.
        shared_share: part of a prompt that it has in common with others, from its start.
        shared_block: tokens of which shared prefixes are multiples.
    """

    mean_input: float
    mean_output: float
    shared_share: float = 0.0
    shared_block: int = 1


PUBLISHED = {
    # Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    # SOSP 2023: the means in the legend of figure 11 (section 6.1).
    "sharegpt": PublishedLengths(161.31, 337.99),
    "alpaca": PublishedLengths(19.31, 58.45),
    # Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", arXiv 2407.00079,
    # sections 4.1 and 4.2: the means, the block size of the hash ids, and the hit ratio of 50 % that a large
    # cache reaches; that it is half of each prompt is assumed.
    "mooncake": PublishedLengths(7590, 182, shared_share=0.5, shared_block=512),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of one request in tokens; the first `prefix_len` of its prompt are those of prefix `prefix`."""

    input_len: int
    output_len: int
    prefix: int = 0
    prefix_len: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and how many tokens to generate from it."""

    prompt_token_ids: list[int]
    output_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """The requests to measure, those to send before, and what became of their lengths.

    Args:
        requests: in the order in which they arrive.
        warmup: share no token sequence with them on purpose.
        num_clipped: requests that were shortened to fit.
        reusable_tokens: prompt tokens that an earlier prompt began with too.
    """

    requests: list[BenchRequest]
    warmup: list[BenchRequest]
    num_clipped: int
    reusable_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return counts and means of tokens."""
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
        vocabulary: ids to make prompts of, see `ordinary_tokens`.
        max_model_len: most tokens of a prompt and its output together; None if nobody knows.

    Raises:
        ConfigError: lengths that were asked for exactly do not fit.
    """
    if config.dataset == "random":
        shapes = fixed_shapes(config, max_model_len)
        num_clipped = 0
    else:
        drawn = drawn_shapes(config)
        shapes = [clipped(shape, max_model_len) for shape in drawn]
        num_clipped = sum(shape != original for shape, original in zip(shapes, drawn, strict=True))
    return Workload(
        requests=with_tokens(shapes, vocabulary, config.seed),
        warmup=without_prefix(islice(cycle(shapes), config.warmup), vocabulary, config.seed),
        num_clipped=num_clipped,
        reusable_tokens=reusable_tokens(shapes),
    )


def fixed_shapes(config: WorkloadConfig, max_model_len: int | None) -> list[Shape]:
    """Return equal shapes, as the random dataset has them.

    Raises:
        ConfigError: they do not fit `max_model_len`.
    """
    prefix_len = config.prefix_len or 0
    input_len = prefix_len + (config.input_len or DEFAULT_INPUT_LEN)
    output_len = config.output_len or DEFAULT_OUTPUT_LEN
    require_fit(input_len, output_len, max_model_len)
    return [Shape(input_len, output_len, prefix_len=prefix_len)] * config.num_prompts


def require_fit(input_len: int, output_len: int, max_model_len: int | None) -> None:
    """Raise `ConfigError` if a prompt and its output, in tokens, are longer than `max_model_len`."""
    if max_model_len is not None and input_len + output_len > max_model_len:
        raise ConfigError(
            f"a prompt of {input_len:,} and an output of {output_len:,} tokens make "
            f"{input_len + output_len:,}; the limit is {max_model_len:,}: lower --input-len or --output-len, "
            "or raise --max-model-len if the model allows"
        )


def drawn_shapes(config: WorkloadConfig) -> list[Shape]:
    """Draw shapes with the published means of a dataset, times `config.scale`."""
    published = PUBLISHED[config.dataset]
    scale = 1.0 if config.scale is None else config.scale
    generator = np.random.default_rng([config.seed, LENGTHS])
    count = config.num_prompts
    inputs = lognormal_lengths(generator, published.mean_input * scale, count)
    outputs = lognormal_lengths(generator, published.mean_output * scale, count)
    if not published.shared_share:
        return [Shape(*lengths) for lengths in zip(inputs, outputs, strict=True)]
    prefixes = generator.integers(max(1, count // ASSUMED_REQUESTS_PER_PREFIX), size=count).tolist()
    block = max(1, round(published.shared_block * scale))
    return [
        Shape(input_len, output_len, prefix, round(input_len * published.shared_share / block) * block)
        for input_len, output_len, prefix in zip(inputs, outputs, prefixes, strict=True)
    ]


def lognormal_lengths(generator: np.random.Generator, mean: float, count: int) -> list[int]:
    """Draw lengths of at least one token from a lognormal distribution of this mean."""
    location = math.log(mean) - ASSUMED_SIGMA**2 / 2
    drawn = generator.lognormal(location, ASSUMED_SIGMA, count)
    lengths: list[int] = np.maximum(1, np.rint(drawn)).astype(np.int64).tolist()
    return lengths


def clipped(shape: Shape, max_model_len: int | None) -> Shape:
    """Return `shape`, or one of its proportions that fits `max_model_len` tokens."""
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


def reusable_tokens(shapes: Sequence[Shape]) -> int:
    """Return how many prompt tokens stand at the start of an earlier prompt as well."""
    longest: dict[int, int] = {}
    reusable = 0
    for shape in shapes:
        known = longest.get(shape.prefix, 0)
        reusable += min(known, shape.prefix_len)
        longest[shape.prefix] = max(known, shape.prefix_len)
    return reusable


def ordinary_tokens(tokenizer: Tokenizer, vocab_size: int | None = None) -> np.ndarray:
    """Return the ids [n] of a tokenizer's vocabulary that mean nothing special, in order.

    Args:
        vocab_size: of the model, where it is known: ids from there on are left out.
    """
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    ids = sorted(set(tokenizer.backend.get_vocab(with_added_tokens=True).values()) - special)
    return np.array([id_ for id_ in ids if vocab_size is None or id_ < vocab_size], dtype=np.int64)


def with_tokens(shapes: Sequence[Shape], vocabulary: np.ndarray, seed: int) -> list[BenchRequest]:
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


def without_prefix(shapes: Iterable[Shape], vocabulary: np.ndarray, seed: int) -> list[BenchRequest]:
    """Fill shapes with random tokens that `with_tokens` does not use."""
    generator = np.random.default_rng([seed, WARMUP])
    return [
        BenchRequest(generator.choice(vocabulary, shape.input_len).tolist(), shape.output_len)
        for shape in shapes
    ]
