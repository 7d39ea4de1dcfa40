"""A model on two GPUs: the tokens of one, the same bits in any company, and an end when a rank is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkpoints import make_checkpoint
from engine_checks import core_of
from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.kernels.triton.device import is_interpreted

pytestmark = pytest.mark.skipif(
    not is_interpreted and torch.cuda.device_count() < 2, reason="needs two GPUs; CUDA shows fewer"
)
NUM_TOKENS = 3 if is_interpreted else 24
PROMPTS = [[7, 18, 29], [40], list(range(5, 5 + (10 if is_interpreted else 70)))]
DEVICE: dict[str, Any] = {"kernels": "triton"} if is_interpreted else {"device": "cuda"}
SETTINGS: dict[str, Any] = {**DEVICE, "num_kv_blocks": 64, "block_size": 16, "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, ignore_eos=True, logprobs=1)


def results(llm: LLM, numbers: list[int]) -> list[Any]:
    params = [DRAWN if number % 2 else GREEDY for number in numbers]
    outputs = llm.generate([PROMPTS[number] for number in numbers], params)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


@pytest.mark.parametrize("family", ["qwen3"] if is_interpreted else ["qwen3", "olmo2", "qwen3_moe"])
def test_two_gpus_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(family, tmp_path, dtype="float32"))
    with LLM(checkpoint, **SETTINGS) as llm:
        alone = results(llm, [0, 1, 2])
    with LLM(checkpoint, tensor_parallel_size=2, **SETTINGS) as llm:
        together = results(llm, [0, 1, 2])
        one_by_one = [results(llm, [number])[0] for number in range(3)]
    assert [token_ids for token_ids, _ in together] == [token_ids for token_ids, _ in alone]
    assert one_by_one == together


@pytest.mark.skipif(is_interpreted, reason="captures CUDA graphs; tests/e2e/test_captured_ranks.py has tapes")
def test_steps_that_two_gpus_replay_have_the_bits_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = str(make_checkpoint("qwen3", tmp_path, dtype="bfloat16", hidden_size=128))
    settings = {**SETTINGS, "tensor_parallel_size": 2}
    with LLM(checkpoint, cuda_graphs=False, **settings) as llm:
        expected = results(llm, [0, 1, 2])
    with LLM(checkpoint, **settings) as llm:
        assert [results(llm, [0, 1, 2]) for _ in range(2)] == [expected] * 2
        graphs = core_of(llm).runner.graph_stats
        assert graphs is not None
        assert graphs.num_graphs
    assert "as a graph" not in caplog.text


def test_an_engine_ends_with_a_rank(tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint("qwen3", tmp_path))
    with LLM(checkpoint, tensor_parallel_size=2, **SETTINGS) as llm:
        [pid] = core_of(llm).ranks.pids
        send = core_of(llm).ranks.send

        def send_and_kill(message: Any) -> None:
            send(message)
            os.kill(pid, signal.SIGKILL)

        core_of(llm).ranks.send = send_and_kill
        with pytest.raises(EngineDeadError, match=rf"rank 1, the process {pid}, was killed by SIGKILL"):
            llm.generate(PROMPTS, GREEDY)
    assert not psutil.pid_exists(pid)
