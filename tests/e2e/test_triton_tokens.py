"""The engine with kernels in Triton, in its interpreter: the reference's tokens."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.kernels.triton.device import is_interpreted

PROMPTS = ["What is 27 + 58?", "What is"]


@pytest.mark.skipif(not is_interpreted, reason="an engine's buffers are not on the GPU yet")
def test_greedy_tokens_are_those_of_the_reference() -> None:
    params = [SamplingParams(max_tokens=3, temperature=0.0, logprobs=1) for _ in PROMPTS]
    outputs = {}
    for kernels in ("reference", "triton"):
        with LLM("mini", kernels=kernels, num_kv_blocks=16, max_num_seqs=2, block_size=16) as llm:
            outputs[kernels] = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    for found, expected in zip(outputs["triton"], outputs["reference"], strict=True):
        assert found.token_ids == expected.token_ids
        assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=0.05)
