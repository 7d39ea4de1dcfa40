"""Layers with windows in caches of their own: the tokens and bits of one cache that keeps all.

What has left a window is NaN in these tests, as is `NULL_BLOCK`: a kernel that reads it is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorder import Recorder
from step_driver import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    StepDriver,
    int_array,
    plan,
    preempt_now_and_then,
)

from checkpoints import make_checkpoint
from memory_connector import MemoryConnector
from quire.execution.drafts.draft_model_proposer import DraftModelProposer
from quire.execution.model_runner import ModelRunner
from quire.kernels.size_classes import size_class
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.blocks.groups import NULL_BLOCK, cache_groups
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.step import ForkData, NewRequestData

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_BLOCKS = 100
KERNELS = ["reference", "native", pytest.param("triton", marks=pytest.mark.interpreter)]


def load(path: Path, family: str = "gemma3", **options: Any) -> Decoder:
    checkpoint = make_checkpoint(family, path)
    return load_decoder(checkpoint, read_model_config(checkpoint), options=WeightOptions(**options))


def driver_of(model: Decoder, *, keeps_all: bool = False, dtype: str = "", **parts: Any) -> StepDriver:
    groups = cache_groups(model.config.kv_layers, keeps_all=keeps_all)
    caches = [
        PagedAttentionCache.init_cache(
            None,
            PagedAttentionCacheMetaData.for_layers(
                group.layers, page_size=BLOCK_SIZE, dtype=dtype or model.dtype, num_pages=NUM_BLOCKS - number
            ),
        )
        for number, group in enumerate(groups)
    ]
    runner = ModelRunner(
        model, caches, max_num_seqs=4, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **parts
    )
    return StepDriver(runner, *caches, max_num_seqs=4, windows=[group.window for group in groups])


def results(
    driver: StepDriver, lengths: Iterable[int] = (3, 37, 50), num_output: int = 12, **options: Any
) -> Any:
    for number, length in enumerate(lengths):
        prompt = [5 + (7 * number + 3 * place) % 90 for place in range(length)]
        driver.add(str(number), prompt, GREEDY)
    driver.run(num_output, **options)
    return {name: (request.output, request.logprobs) for name, request in driver.requests.items()}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gemma4"])  # mistral's first group has no layers
def test_tokens_and_bits_are_those_of_one_cache(tmp_path: Path, family: str, kernels: str) -> None:
    """Of chunks across the edge of the window and decodes, also of requests that are computed again."""
    model = load(tmp_path, family, kernels=kernels)
    lengths, num_output = ([3, 37, 50], 12) if kernels != "triton" else ([22], 3)
    expected = results(driver_of(model, keeps_all=True), lengths, num_output, chunk=7)
    driver = driver_of(model)
    assert len(driver.kv_caches) == 2
    assert results(driver, lengths, num_output, chunk=7, on_step=preempt_now_and_then(driver)) == expected


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"cache": "int8"}], ids=str)
def test_other_types_have_the_same_bits(tmp_path: Path, options: dict[str, str]) -> None:
    model = load(tmp_path, kernels="native", dtype=options.get("dtype", "float32"))
    driver, whole = (
        driver_of(model, keeps_all=keeps_all, dtype=options.get("cache", "")) for keeps_all in (False, True)
    )
    assert results(driver, chunk=9) == results(whole, chunk=9)


def test_drafts_are_the_same(tmp_path: Path) -> None:
    """A draft model is in blocks of the first group; some drafts are wrong."""
    model = load(tmp_path)

    def drafted(*, keeps_all: bool) -> Any:
        metadata = PagedAttentionCacheMetaData.for_layers(
            model.config.kv_layers, page_size=BLOCK_SIZE, dtype="float32", num_pages=NUM_BLOCKS
        )
        proposer = DraftModelProposer(model, PagedAttentionCache.init_cache(None, metadata))
        driver = driver_of(model, keeps_all=keeps_all, proposer=proposer)
        driver.add("r", [5 + 3 * place % 90 for place in range(30)], GREEDY)
        driver.step({"r": 30}, num_drafts_wanted=3)
        request, found = driver.requests["r"], []
        for number in range(8):
            drafts = [] if number == 0 else found[-1][: 3 - number % 2] + [7] * (number % 2)
            result = driver.step({"r": 1}, drafts={"r": drafts}, num_drafts_wanted=3)
            found.append([token for token in result.draft_token_ids[0].tolist() if token >= 0])
        return request.output, request.logprobs, found

    assert drafted(keeps_all=False) == drafted(keeps_all=True)


@pytest.mark.interpreter
@torch.inference_mode()
def test_captured_steps_have_arrays_of_each_group(tmp_path: Path) -> None:
    model = load(tmp_path, kernels="triton")
    model.reserve(size_class(64))
    recorder = Recorder()
    expected = results(driver_of(model, keeps_all=True), [14], 7)
    assert results(driver_of(model, capture=recorder.capture), [14], 7) == expected
    assert recorder.num_replays > recorder.num_captures > 0


def sliding_row(driver: StepDriver, request_id: str, **options: Any) -> list[Any]:
    """Return the tokens and log-probabilities of one decode step of a request."""
    result = driver.runner.execute(plan(ids=[request_id], num_groups=2, **options))
    return [result.sampled_token_ids[0, 0].item(), *result.logprobs[request_id]]


@torch.inference_mode()
def test_forks_and_copies_are_of_each_group(tmp_path: Path) -> None:
    """A beam goes on in blocks of its own, of which only those of the window are there."""
    model = load(tmp_path)
    driver = driver_of(model)
    prompt = [5 + 3 * place % 90 for place in range(26)]
    driver.add("a", prompt, GREEDY)
    driver.step({"a": 26})
    first = driver.requests["a"]
    token = first.output[0]
    driver.step({"a": 1})
    expected = [first.output[1], first.logprobs[1]]
    slot = (first.slot + 1) % 4
    tables = [list(table) for table in first.tables]
    num_left = (26 - driver.windows[1] + 1) // BLOCK_SIZE
    assert tables[1][:num_left] == [NULL_BLOCK] * num_left
    copies = []
    copied = [driver.free[0].pop(), driver.free[1].pop()]
    copies.append(([table[-1] for table in tables], copied))
    for table, block in zip(tables, copied, strict=True):
        table[-1] = block
    new = NewRequestData("b", slot, int_array(prompt), [], GREEDY, (), int_array([[], []]), 26)
    fork = ForkData(slot, first.slot, int_array(tables), 27, 26)
    found = sliding_row(
        driver, "b", slots=[slot], num_tokens=[1], computed=[26], known=[27], new=[new], forks=[fork],
        chosen=[(slot, token)], copies=copies,
    )  # fmt: skip
    assert found == expected


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([[7, 8]], r"block ids of shape \[1, 2\]; they must be \[2, blocks\]"),
        ([7, 8], r"block ids of shape \[2\]; they must be \[2, blocks\]"),
        ([[7, 8], [7, 99]], "block ids from 7 to 99; the cache of group 1 has blocks 0 to 98"),
        ([[7, 8], [-1, 8]], "block ids from -1 to 8; the cache of group 1"),
        ([[7, 100], [7, 8]], "block ids from 7 to 100; the cache of group 0 has blocks 0 to 99"),
        ([[7, 8], [7, 0]], "block 0, which nothing is written to, as number 1 or later"),
    ],
)
def test_blocks_that_a_group_has_not_are_refused(tmp_path: Path, block_ids: Any, message: str) -> None:
    driver = driver_of(load(tmp_path))
    new = NewRequestData("r", 0, np.arange(5, dtype=np.int32), [], GREEDY, (), int_array(block_ids), 4)
    with pytest.raises(ValueError, match=message):
        driver.runner.execute(plan([0], [1], [4], ["r"], new=[new], num_groups=2))


def test_eviction_and_connectors_that_are_not_by_group_need_one_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 2 cache groups; eviction, and connectors"):
        driver_of(load(tmp_path), connector=MemoryConnector(BLOCK_SIZE))
