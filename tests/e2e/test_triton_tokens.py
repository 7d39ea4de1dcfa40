"""The engine with kernels in Triton, in its interpreter, as it would run on a GPU: the reference's tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from engine_checks import core_of
from operation_tape import capture_steps
from quire import LLM, CacheEvictionConfig, SamplingParams, SchedulerConfig
from quire.engine import devices
from quire.engine.core import EngineCore
from quire.engine.ranks.messages import CompileOnly, Forward, ToRank
from quire.execution.model_runner import ModelRunner
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.triton.device import is_interpreted
from quire.kv.eviction.selection import BlockSelection

pytestmark = pytest.mark.interpreter

PROMPTS = ["What is 27 + 58?", "What is"]


@pytest.mark.first_case
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_tokens_are_those_of_the_reference(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps overlap, the device chooses the tokens that need no host, and decode steps are replayed."""
    if not is_interpreted:
        pytest.skip("on a GPU, tests/gpu has this")
    params = [
        SamplingParams(max_tokens=6, temperature=0.0),
        SamplingParams(max_tokens=6, temperature=0.7, top_p=0.8, seed=3, logprobs=1, frequency_penalty=0.9),
    ]
    options = {"num_kv_blocks": 16, "max_num_seqs": 2, "block_size": 16, "dtype": "float32"}
    options["kv_cache_dtype"] = kv_cache_dtype
    monkeypatch.setattr(devices, "_refuse_float8", lambda *_: None)  # the reference is not for users
    with LLM("mini", kernels="reference", **options) as llm:
        expected = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    replayed = capture_steps(monkeypatch)
    threads: list[threading.Thread] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(
        ModelRunner, "execute", lambda *args: (threads.append(threading.current_thread()), execute(*args))[1]
    )
    with LLM("mini", kernels="triton", overlap_steps=True, **options) as llm:
        found = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    # A last bit of a float32 may decide where its float8 number is rounded to.
    tolerance = 1e-3 if kv_cache_dtype == "auto" else 0.05
    assert found[1].cumulative_logprob == pytest.approx(expected[1].cumulative_logprob, abs=tolerance)
    assert len(replayed) > 1
    assert {thread is threading.current_thread() for thread in threads} == {False, True}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "granitemoehybrid", "lfm2", "deepseek_v3"])
def test_families_with_layers_of_their_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, one beside the other's answer; then one that goes on from what is cached of this."""
    if not is_interpreted:
        pytest.skip("on a GPU, tests/gpu has this")
    checkpoint = str(make_checkpoint(family, tmp_path, dtype="float32"))
    prompts = [[7 + (11 * place) % 300 for place in range(length)] for length in (3, 23)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    options = {"num_kv_blocks": 24, "max_num_seqs": 2, "block_size": 16, "max_num_batched_tokens": 16}
    found = []
    for kernels in ("reference", "triton"):
        replayed = capture_steps(monkeypatch) if kernels == "triton" else []
        with LLM(checkpoint, kernels=kernels, overlap_steps=kernels == "triton", **options) as llm:
            first, second = (output.outputs[0] for output in llm.generate(prompts, params))
            [again] = llm.generate([[*prompts[1], *second.token_ids, 9]], params)
        assert again.num_cached_tokens == 32
        found.append([first, second, again.outputs[0]])
    assert [output.token_ids for output in found[1]] == [output.token_ids for output in found[0]]
    logprobs = [[output.cumulative_logprob for output in outputs] for outputs in found]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3)
    assert len(replayed) > 1


@pytest.mark.parametrize(("family", "rotates"), [("qwen3", True), ("deepseek_v3", False)])
def test_what_is_evicted_is_what_the_reference_s_scores_say(
    family: str, rotates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemptions, rotated keys, and steps that are in flight while what they evict is decided."""
    if not is_interpreted:
        pytest.skip("on a GPU, tests/gpu has this")
    evicted: list[list[list[int]]] = []
    choose = BlockSelection.choose

    def watch(selection: BlockSelection, *args: Any) -> Any:
        chosen = choose(selection, *args)
        evicted.append(chosen.tolist())
        return chosen

    monkeypatch.setattr(BlockSelection, "choose", watch)
    checkpoint = str(make_checkpoint(family, tmp_path, dtype="float32", num_hidden_layers=2))
    prompts = [[7 + (11 * place) % 300 for place in range(length)] for length in (75, 40)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    scheduler = SchedulerConfig(
        num_kv_blocks=6,
        max_num_seqs=2,
        block_size=16,
        watermark=0.0,
        reserve_full_prompt=False,
        use_cache_eviction=True,
        cache_eviction_config=CacheEvictionConfig(
            start_size=16, recent_size=16, max_cache_size=48, apply_rotation=rotates
        ),
    )
    found = []
    for kernels in ("reference", "triton"):
        with LLM(checkpoint, kernels=kernels, scheduler=scheduler, overlap_steps=True) as llm:
            tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            assert llm.stats().num_preemptions > 0
        found.append((tokens, evicted[:]))
        evicted.clear()
    assert found[1] == found[0]
    assert any(first != second for first, second in found[0][1])


def compile_together(core: EngineCore) -> None:
    """Have both ranks compute one token with kernels that do nothing; then they do again."""
    told: list[ToRank] = []
    send = core.ranks.send
    core.ranks.send = lambda message: (told.append(message), send(message))[1]
    batch = AttentionBatch.build(np.zeros(1), np.ones(1), np.zeros((1, 1)), 16)
    with core.runner.compile_only():
        core.runner._model.forward(torch.zeros(1, dtype=torch.int64), core.runner.kv_caches[0].views, batch)
    assert [type(message) for message in told] == [CompileOnly, Forward, CompileOnly]
    core.ranks.send = send


@pytest.mark.usefixtures("preloaded_engines")
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """The tokens that rank 0's device has chosen get to the other rank without the host."""
    if not is_interpreted:
        pytest.skip("on a GPU, tests/gpu has this")
    checkpoint = str(make_checkpoint("qwen3", tmp_path, dtype="float32", num_hidden_layers=1))
    prompts = [[5, 6, 7, 8, 9], [10]]
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True),
    ]
    options = {"num_kv_blocks": 16, "max_num_seqs": 2, "block_size": 16, "overlap_steps": True}
    found = []
    for size, kernels in ((1, "reference"), (2, "triton")):
        with LLM(checkpoint, kernels=kernels, tensor_parallel_size=size, **options) as llm:
            if size == 2:
                compile_together(core_of(llm))
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[1] == found[0]
