"""Same request, same tokens: alone, in company, in chunks, preempted, and out of the prefix cache.

Log-probabilities are compared too, for equality and not closeness, so this is a test of equal bits. It holds
for every type of numbers that Quire computes in, and for both sets of kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.request_output import RequestOutput

pytestmark = pytest.mark.usefixtures("preloaded_engines")

QUESTIONS = [
    "What is a KV block?",
    "What is chunked prefill, and why does it help requests that are already decoding?",
    "What is 47 + 38?",
    "Copy: k x w q",
    "Reverse: a b c d e f",
    "Why is a request preempted?",
    "What does the scheduler do with a request that can never fit in the KV cache of this engine?",
    "Hello",
]
SYSTEM = "You are a helpful assistant that answers questions about serving large language models. " * 4


def conversations() -> list[list[dict[str, str]]]:
    plain = [[{"role": "user", "content": question}] for question in QUESTIONS]
    system = [{"role": "system", "content": SYSTEM}]
    return [chat if index % 2 else system + chat for index, chat in enumerate(plain * 4)]


def sampling(index: int) -> SamplingParams:
    """Greedy and seeded sampling with every kind of filter and penalty, by turns."""
    common = {"max_tokens": 9 + index % 5, "ignore_eos": True, "logprobs": 3, "seed": index}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    ]
    return SamplingParams(**common, **kinds[index // 8 % len(kinds)])


ALL = range(32)
# Of every kind, with and without the system prompt. The reference takes ten times as long.
NATIVE, REFERENCE = ALL[::3], ALL[::7]


def run(llm: LLM, requests: Sequence[int], *, one_by_one: bool = False) -> dict[int, RequestOutput]:
    chats, params = conversations(), [sampling(index) for index in ALL]
    batches = [[index] for index in requests] if one_by_one else [list(requests)]
    found: dict[int, RequestOutput] = {}
    for batch in batches:
        outputs = llm.chat([chats[index] for index in batch], [params[index] for index in batch])
        found.update(zip(batch, outputs, strict=True))
    return found


def bits(outputs: dict[int, RequestOutput]) -> dict[int, tuple]:
    return {
        index: (
            output.outputs[0].token_ids,
            [
                {token: entry.logprob.hex() for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ],
        )
        for index, output in outputs.items()
    }


NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-kv": {"kv_cache_dtype": "int8"},
    "int4-kv": {"kv_cache_dtype": "int4"},
    "int4-groups-of-32-and-int8-kv-in-float32": {
        "dtype": "float32",
        "quantization": "int4",
        "quantization_group_size": 32,
        "kv_cache_dtype": "int8",
    },
    "reference-bfloat16": {"kernels": "reference", "dtype": "bfloat16"},
    "reference-float32": {"kernels": "reference", "dtype": "float32"},
}


def some(numbers: str) -> range:
    """Return the requests that are also computed alone."""
    return REFERENCE if NUMBERS[numbers].get("kernels") == "reference" else NATIVE


@functools.cache
def alone(numbers: str) -> dict[int, tuple]:
    with LLM("mini", **NUMBERS[numbers], num_kv_blocks=256, enable_prefix_caching=False) as llm:
        return bits(run(llm, some(numbers), one_by_one=True))


def assert_as_alone(outputs: dict[int, RequestOutput], numbers: str) -> None:
    found = bits(outputs)
    compared = found.keys() & alone(numbers).keys()
    assert compared
    assert {index: found[index] for index in compared} == {index: alone(numbers)[index] for index in compared}


def by_turns(name: str, sizes: list[Any]) -> pytest.MarkDecorator:
    """Parametrize with each type of numbers, and one size of its company: the sizes take turns.

    Every type with every size is in tests/models/test_bit_equality.py and tests/kernels.
    """
    cases = zip(NUMBERS, itertools.cycle(sizes), strict=False)
    return pytest.mark.parametrize(
        ("numbers", name), [pytest.param(*case, id=f"{case[0]}-{name}-{case[1]}") for case in cases]
    )


@pytest.mark.formats
@pytest.mark.first_case
@by_turns("tokens_per_step", [1, 7, 64])
def test_in_chunks(numbers, tokens_per_step):
    requests = some(numbers)[::3] if tokens_per_step == 1 else some(numbers)  # one token has no company
    with LLM("mini", **NUMBERS[numbers], num_kv_blocks=1024, max_num_batched_tokens=tokens_per_step) as llm:
        assert_as_alone(run(llm, requests), numbers)


@pytest.mark.formats
@pytest.mark.first_case
@by_turns("caching", [True, False])
def test_with_preemptions_in_the_middle(numbers, caching):
    options = {"num_kv_blocks": 24, "max_model_len": 320, "watermark": 0.0, "reserve_full_prompt": False}
    with LLM("mini", **NUMBERS[numbers], enable_prefix_caching=caching, **options) as llm:
        assert_as_alone(run(llm, sorted({*NATIVE, *some(numbers)})), numbers)
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("numbers", NUMBERS)
def test_in_a_batch_of_32_and_out_of_the_prefix_cache(numbers):
    with LLM("mini", **NUMBERS[numbers], num_kv_blocks=1024, max_num_batched_tokens=8192) as llm:
        first = run(llm, ALL)
        assert sum(output.num_cached_tokens for output in first.values()) > 15 * 16, "shared within a step"
        second = run(llm, some(numbers))
        assert sum(output.num_cached_tokens for output in second.values()) > len(second) * 16
        assert_as_alone(first, numbers)
        assert_as_alone(second, numbers)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("numbers", NUMBERS)
def test_with_another_block_size(numbers):
    with LLM("mini", **NUMBERS[numbers], num_kv_blocks=2048, block_size=8) as llm:
        assert_as_alone(run(llm, some(numbers)), numbers)


# Each kind of kernel has a process.
@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("numbers", "num_threads"),
    [
        ("bfloat16", 1),
        ("float32", 2),
        ("float16", 1),
        ("int8", 2),
        ("int4-groups-of-32-and-int8-kv-in-float32", 1),
        ("reference-bfloat16", 2),
    ],
)
def test_after_a_restart_on_another_number_of_threads(numbers, num_threads):
    with LLM(
        "mini", **NUMBERS[numbers], num_kv_blocks=1024, engine_process=True, num_threads=num_threads
    ) as llm:
        assert_as_alone(run(llm, some(numbers)), numbers)
