"""The engine on a GPU: the tokens of `transformers`, and the same bits in any company and any way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from call_through import call_through
from checkpoints import make_checkpoint
from quire import LLM, AdaptiveRKVConfig, CacheEvictionConfig, SamplingParams
from quire.execution.model_runner import ModelRunner
from quire.execution.sampling.captured_choice import NUM_CAPTURED_EDITS, CapturedChoice
from quire.execution.step_graphs import StepGraphs
from quire.kernels.devices.cuda_graphs import CudaGraphs
from quire.kernels.triton.device import is_interpreted

PROMPTS = [[7 + (11 * number + 3 * place) % 300 for place in range(length)] for number, length in enumerate(
    (1, 5, 18) if is_interpreted else (1, 5, 18, 40, 61, 100, 3, 29)
)]  # fmt: skip
NUM_TOKENS = 4 if is_interpreted else 24
DEVICE: dict[str, Any] = {"kernels": "triton"} if is_interpreted else {"device": "cuda"}
SETTINGS: dict[str, Any] = {**DEVICE, "num_kv_blocks": 64, "block_size": 16, "max_model_len": 128}


OF_THEIR_OWN = ["gpt_oss", "lfm2", "qwen3_next", "granitemoehybrid", "nemotron_h", "deepseek_v3"]
"""Families with layers of their own."""

NUMBERS: list[dict[str, Any]] = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
]


def params(number: int) -> SamplingParams:
    how = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
    penalties = {"frequency_penalty": 0.8, "repetition_penalty": 1.2} if number % 3 == 2 else {}
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **how, **penalties)


def generate(
    checkpoint: Path, prompts: list[list[int]] = PROMPTS, *, one_by_one: bool = False, **options: Any
) -> list[Any]:
    """Return token ids and the bits of their log-probabilities of each prompt."""
    with LLM(str(checkpoint), **{**SETTINGS, **options}) as llm:
        if not is_interpreted:
            assert llm.info.device.startswith("cuda")
        wanted = [params(number) for number in range(len(prompts))]
        if one_by_one:
            outputs = [llm.generate([prompt], [how])[0] for prompt, how in zip(prompts, wanted, strict=True)]
        else:
            outputs = llm.generate(prompts, wanted)
        assert (llm.stats().num_evicted_blocks > 0) == options.get("use_cache_eviction", False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob.hex()) for output in outputs]


@pytest.mark.parametrize(
    "family", ["qwen3"] if is_interpreted else ["qwen3", "llama", "gemma2", "qwen3_moe", *OF_THEIR_OWN]
)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(checkpoint), dtype="float32", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, greedy)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        for token in output.outputs[0].token_ids:
            logits = model(ids).logits[0, -1]
            assert logits[token] >= logits.max() - 1e-4  # another one only if they are as good as equal
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_log_probabilities_of_prompts_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pieces make up a chunk."""
    checkpoint = make_checkpoint("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    monkeypatch.setattr("quire.kernels.bounds.PROMPT_LOGITS", 0)
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=7, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, wanted)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        for place, found in enumerate(output.prompt_logprobs[1:]):
            assert found is not None
            assert prompt[1 + place] in found
            assert len(found) >= 3
            for token_id, one in found.items():
                assert one.logprob == pytest.approx(expected[place, token_id].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("qwen3", options) for options in NUMBERS[: 1 if is_interpreted else None]),
        *((family, {}) for family in OF_THEIR_OWN if not is_interpreted),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The batch-invariance list: alone, together, in chunks, and with steps that are not captured."""
    size = {"hidden_size": 128} if family == "qwen3" else {}
    checkpoint = make_checkpoint(family, tmp_path, dtype="bfloat16", **size)
    alone = generate(checkpoint, one_by_one=True, enable_prefix_caching=False, **options)
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_kv_blocks": 12, "max_num_seqs": 4},  # with preemptions
        {"cuda_graphs": False},
    ]
    for way in ways[: 2 if is_interpreted else None]:
        assert generate(checkpoint, **{**options, **way}) == alone, way


@pytest.mark.skipif(is_interpreted, reason="tests/execution/test_step_graphs.py has this")
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_chunks_of_prompts_are_replayed(
    has_draft_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests three times: steps of the same sizes are captured, and then replayed."""
    checkpoint = make_checkpoint("qwen3", tmp_path, dtype="bfloat16", hidden_size=128)
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    alone = generate(checkpoint, one_by_one=True, **options)
    if has_draft_model:
        options |= {"speculative_method": "draft-model", "draft_model": str(checkpoint)}
    graphs: set[StepGraphs] = set()

    def watched(filled: Any, self: StepGraphs, *step: Any) -> Any:
        graphs.add(self)
        return filled(self, *step)

    call_through(monkeypatch, StepGraphs, "_filled", watched)
    monkeypatch.setattr(ModelRunner, "_is_small", lambda _self, _output, sampling: len(sampling.tokens) > 0)
    wanted = [params(number) for number in range(len(PROMPTS))]
    with LLM(str(checkpoint), **{**SETTINGS, **options}) as llm:
        for _ in range(3):
            outputs = [output.outputs[0] for output in llm.generate(PROMPTS, wanted)]
            assert [(one.token_ids, one.cumulative_logprob.hex()) for one in outputs] == alone
    replayed = [graph for one in graphs for graph in one._graphs.values() if graph.replay is not None]
    assert any(graph.arrays.logit_rows is not None and graph.logits is not None for graph in replayed)
    assert any(graph.logits is None for graph in replayed) == has_draft_model


@pytest.mark.skipif(is_interpreted, reason="tests/kernels/test_cuda_graphs.py has this")
def test_a_graph_is_captured_after_one_that_cuda_has_ended_with_an_error() -> None:
    graphs, number = CudaGraphs(), torch.zeros(1, device="cuda")
    number.add_(0)  # its kernel is loaded
    graphs.capture(lambda: number.add_(1))
    with pytest.raises(RuntimeError):
        graphs.capture(torch.cuda.synchronize)  # which ends it
    torch.cuda.empty_cache()
    graphs.capture(lambda: number.add_(1))()
    assert number.item() == 1


@pytest.mark.skipif(is_interpreted, reason="tests/execution/test_captured_choice.py has this")
def test_choices_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of greedy requests, and of these beside drawn, penalized, masked and edited ones, as without graphs."""
    checkpoint = make_checkpoint("qwen3", tmp_path, dtype="bfloat16", hidden_size=128)
    captured: list[CapturedChoice] = []
    choose = CapturedChoice.choose

    def watched(self: CapturedChoice, *args: Any) -> Any:
        captured.append(self)
        return choose(self, *args)

    monkeypatch.setattr(CapturedChoice, "choose", watched)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.9, top_p=0.9, seed=1)
    penalized = dataclasses.replace(drawn, repetition_penalty=1.3, frequency_penalty=0.5)
    masked = dataclasses.replace(greedy, allowed_token_ids=tuple(range(5, 200, 3)))
    edited = dataclasses.replace(
        greedy, logit_bias={7: 5.0, 9: 4.5}, bad_words_token_ids=((7, 7), (9, 9), (7, 9, 7)), min_tokens=2
    )
    groups = (
        [greedy] * 4,
        [greedy, drawn, drawn, greedy],
        [greedy, penalized, drawn, masked],
        [edited, greedy, penalized, masked],
    )
    found = []
    for has_graphs in (True, False):
        with LLM(str(checkpoint), cuda_graphs=has_graphs, **SETTINGS) as llm:
            outputs = [
                output.outputs[0].token_ids
                for wanted in groups
                for _ in range(3)
                for output in llm.generate(PROMPTS[:4], wanted)
            ]
        found.append(outputs)
    assert found[0] == found[1]
    assert all(pause.allows_attempt() for pause in captured[-1]._pauses.values())
    kinds = {tuple(kind) for _, _, kind in captured[-1]._replays}
    most_edits = NUM_CAPTURED_EDITS[0]
    wanted = {(False, False, False, 0), (True, False, False, 0), (True, True, True, 0)}
    assert {*wanted, (True, True, True, most_edits)} <= kinds


EVICTIONS: dict[str, dict[str, Any]] = {
    "rotation": {"apply_rotation": True},
    "norm_sum": {},
    "adaptive_rkv": {
        "aggregation_mode": "adaptive_rkv",
        "adaptive_rkv_config": AdaptiveRKVConfig(attention_mass=0.3),
    },
}


@pytest.mark.parametrize("way", list(EVICTIONS)[: 1 if is_interpreted else None])
def test_what_is_evicted_does_not_depend_on_company(way: str, tmp_path: Path) -> None:
    """Steps are in flight while what they evict is decided."""
    checkpoint = make_checkpoint("qwen3", tmp_path, dtype="bfloat16", hidden_size=128)
    prompts = [[5 + 3 * place % 300 for place in range(75)], *PROMPTS]
    options = {
        "use_cache_eviction": True,
        "cache_eviction_config": CacheEvictionConfig(
            start_size=16, recent_size=16, max_cache_size=48, **EVICTIONS[way]
        ),
    }
    alone = generate(checkpoint, prompts, one_by_one=True, enable_prefix_caching=False, **options)
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 32, "max_num_seqs": 8},
        {"num_kv_blocks": 12, "max_num_seqs": 4},  # with preemptions
        {},
    ]
    for how in ways[: 1 if is_interpreted else None]:
        assert generate(checkpoint, prompts, **{**options, **how}) == alone, how
