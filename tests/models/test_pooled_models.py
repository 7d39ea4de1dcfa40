"""Models whose prompts become rows: a decoder, and layers from outside of Quire that are not causal."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bidirectional_layer import BidirectionalConfig, attended
from random_weights import PlainModel, Tensors, write_weights
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_model, make_tokenizer
from engine_checks import check_after_every_step, core_of
from lockstep_ranks import LockstepRanks
from paged_harness import PagedHarness, random_prompts
from preempting import preempt
from quire import (
    LLM,
    AsyncLLM,
    EngineConfig,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    SchedulerConfig,
)
from quire.engine.core import EngineCore
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.families import ARCHITECTURES, FAMILIES
from quire.models.families.family import Family
from quire.models.layer import LayerConfig
from quire.scheduling.outputs import EngineCoreOutput

KINDS = ("last", "cls", "mean")
SMALL = {"num_kv_blocks": 32, "block_size": 16, "num_threads": 1}


def pooled_rows(hidden: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the row of each kind of [T, hidden]."""
    rows = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.double().mean(0)}
    return {kind: row.float().numpy() for kind, row in rows.items()}


def encode(llm: LLM, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
    outputs = llm.encode(prompts, PoolingParams(**params))
    assert [output.outputs.finish_reason for output in outputs] == ["stop"] * len(prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [output.outputs.data for output in outputs]


def preempt_at_times(core: EngineCore) -> None:
    """Preempt what is in slot 0 after some steps; check invariants after each."""
    step, numbers = core.step, itertools.count()

    def preempting_step() -> tuple[list[EngineCoreOutput], bool]:
        result = step()
        if next(numbers) in (0, 2, 3):
            preempt(core.scheduler, 0)
        core.scheduler.check_invariants()
        return result

    core.step = preempting_step


# -- a decoder ---------------------------------------------------------------------------------------------


@pytest.fixture
def pooled_qwen3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints of Qwen3 be of a model that was trained to be pooled by the last token, normalized."""
    family = FAMILIES["qwen3"]

    def pooled(hf: Any, base: ModelConfig) -> ModelConfig:
        own = PoolingParams(pooling_type="last", normalize=True)
        return dataclasses.replace(family.specialize(hf, base), pooling=own)

    monkeypatch.setitem(FAMILIES, "qwen3", dataclasses.replace(family, specialize=pooled))


@pytest.mark.usefixtures("pooled_qwen3")
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_rows_are_those_of_transformers(kernels: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    reference = make_model("qwen3")
    prompts = random_prompts([1, 5, 40, 70], vocab_size=384)
    with LLM(str(path), kernels=kernels, max_num_batched_tokens=32, **SMALL) as llm:
        for kind in KINDS:
            rows = encode(llm, prompts, pooling_type=kind, normalize=False)
            for prompt, row in zip(prompts, rows, strict=True):
                with torch.inference_mode():
                    hidden = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
                assert row.dtype == np.float32
                np.testing.assert_allclose(row, pooled_rows(hidden)[kind], atol=2e-4, rtol=1e-4)
        [normalized] = llm.encode(prompts[2])
        [plain] = encode(llm, prompts[2:3], normalize=False)
    expected = plain / np.linalg.norm(plain.astype(np.float64))
    np.testing.assert_allclose(normalized.outputs.data, expected, rtol=1e-6)


@pytest.mark.usefixtures("pooled_qwen3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_nothing_but_its_prompt(kind: str, tmp_path: Path) -> None:
    """Not on other requests, chunks, preemption, cached prefixes, or steps that overlap: bit for bit."""
    path = str(make_checkpoint("qwen3", tmp_path))
    prompts = random_prompts([90, 33, 3, 64, 17, 90], vocab_size=384)
    prompts[5][:80] = prompts[0][:80]
    with LLM(path, enable_prefix_caching=False, **SMALL) as llm:
        alone = [encode(llm, [prompt], pooling_type=kind)[0] for prompt in prompts]
    for options in (
        {},
        {"max_num_batched_tokens": 7, "overlap_steps": True},
        {"max_num_batched_tokens": 40, "num_kv_blocks": 7, "max_model_len": 100},
    ):
        with LLM(path, **{**SMALL, **options}) as llm:
            preempt_at_times(core_of(llm))
            for _ in range(2):
                found = encode(llm, prompts, pooling_type=kind)
                assert [row.tobytes() for row in found] == [row.tobytes() for row in alone]
            if "max_num_batched_tokens" in options:
                assert llm.stats().num_preemptions


@pytest.mark.usefixtures("pooled_qwen3")
def test_prefixes_are_reused_where_the_row_allows(tmp_path: Path) -> None:
    [prompt] = random_prompts([64], vocab_size=384)
    with LLM(str(make_checkpoint("qwen3", tmp_path)), **SMALL) as llm:
        cached = {}
        for kind in ("last", *KINDS):
            [output] = llm.encode([prompt], PoolingParams(pooling_type=kind))
            cached[kind] = output.num_cached_tokens
        assert cached == {"last": 48, "cls": 0, "mean": 0}
        [output] = llm.encode([prompt], cache_salt="other")
        assert output.num_cached_tokens == 0


@pytest.mark.usefixtures("pooled_qwen3")
def test_one_request_that_fails_ends_alone(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    sound, damaged = [3, 4, 5] * 6, [3, 4, 5, 7, 5]
    with LLM(str(path), **SMALL) as llm:
        for kind in ("mean", "last"):
            outputs = llm.encode([sound, damaged, sound], PoolingParams(pooling_type=kind))
            assert [output.outputs.finish_reason for output in outputs] == ["stop", "error", "stop"]
            assert "NaN or infinite" in outputs[1].outputs.error
            assert outputs[1].outputs.data is None
            assert np.isfinite(outputs[0].outputs.data).all()
        [short] = llm.encode([sound], timeout=1e-9)
        assert short.outputs.finish_reason == "error"


@pytest.mark.usefixtures("pooled_qwen3")
def test_the_longest_prompt_needs_no_room_for_output(tmp_path: Path) -> None:
    [prompt] = random_prompts([33], vocab_size=384)
    with LLM(str(make_checkpoint("qwen3", tmp_path)), max_model_len=32, **SMALL) as llm:
        assert len(encode(llm, [prompt[:32]])) == 1
        with pytest.raises(ContextLengthError, match=r"33 tokens; the limit is 32 \(max_model_len is 32\)"):
            llm.encode([prompt])
        for num_tokens in (-1, 32):
            [cut] = llm.encode([prompt], truncate_prompt_tokens=num_tokens)
            assert cut.prompt_token_ids == prompt[1:]
        with pytest.raises(InvalidRequestError, match=r"it must be -1, or from 1 to 32, "):
            llm.encode([prompt], truncate_prompt_tokens=33)


def test_a_model_of_the_other_kind_is_refused(tmp_path: Path, pooled_qwen3: None) -> None:
    with LLM(str(make_checkpoint("qwen3", tmp_path / "qwen3")), **SMALL) as llm:
        for generate in (llm.generate, llm.chat):
            given = "a" if generate == llm.generate else [{"role": "user", "content": "a"}]
            with pytest.raises(InvalidRequestError, match=r"cannot generate; use LLM\.embed"):
                generate(given, SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequestError, match=r"pooling_type is .means.; did you mean"):
            llm.encode("a", PoolingParams(pooling_type="means"))
        with pytest.raises(InvalidRequestError, match="pooling_params must be PoolingParams"):
            llm.encode("a", SamplingParams())
        assert len(llm.encode(["a", {"prompt": "b"}])) == 2
    with LLM(str(make_checkpoint("llama", tmp_path / "llama")), **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match=r"generates, and its prompts cannot be pooled"):
            llm.encode("a")
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


@pytest.mark.usefixtures("pooled_qwen3")
@pytest.mark.parametrize(
    "options", [{"speculative_method": "ngram"}, {"use_cache_eviction": True}], ids=["drafts", "eviction"]
)
def test_what_only_generating_needs_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is .* generates nothing; leave it out"):
        LLM(str(path), num_kv_blocks=32, **options)


# -- layers that are not causal ------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["ToyEncoder"],
    "model_type": "toy_encoder",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def encoder(hf: Any, base: ModelConfig) -> ModelConfig:
    mixer = BidirectionalConfig(size=48)
    layers = tuple(LayerConfig((mixer, layer.parts[1])) for layer in base.layers)
    kind = hf.get("pooling_type", "mean") or None
    pooling = None if hf.get("generates", False) else PoolingParams(pooling_type=kind, normalize=False)
    return dataclasses.replace(base, layers=layers, pooling=pooling)


@pytest.fixture
def toy_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy_encoder", Family(encoder, FAMILIES["llama"].weight_names))
    monkeypatch.setitem(ARCHITECTURES, "ToyEncoder", "toy_encoder")


class PlainEncoder(PlainModel):
    """The hidden states of a whole prompt in plain torch."""

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        self.tensors["lm_head.weight"] = torch.eye(CONFIG["hidden_size"])
        return self.logits(token_ids)


def make_encoder(path: Path, **config: Any) -> PlainEncoder:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    model_config = read_model_config(path)
    plain = PlainEncoder(model_config, write_weights(model_config, path))
    assert "lm_head.weight" not in plain.tensors
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    make_tokenizer(path)
    plain.mixers[BidirectionalConfig] = mixed
    return plain


def mixed(rows: torch.Tensor, own: Tensors) -> torch.Tensor:
    return attended(rows @ own["mixer.qkv"].T) @ own["mixer.out"].T


@pytest.mark.usefixtures("toy_encoder")
@pytest.mark.parametrize("overlap_steps", [False, True])
def test_prompts_of_an_encoder_are_computed_whole(overlap_steps: bool, tmp_path: Path) -> None:
    plain = make_encoder(tmp_path)
    prompts = random_prompts([3, 60, 60, 17, 64, 1], vocab_size=384)
    prompts[2] = prompts[1]
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "overlap_steps": overlap_steps}
    with LLM(str(tmp_path), num_threads=1, **options) as llm:
        check_after_every_step(core_of(llm))
        assert llm.info.kv_cache_bytes == 0
        assert llm.info.num_blocks * llm.info.block_size >= 3 * 256
        for kind in KINDS:
            for prompt, row in zip(prompts, encode(llm, prompts, pooling_type=kind), strict=True):
                expected = pooled_rows(plain.hidden(prompt))[kind]
                np.testing.assert_allclose(row, expected, atol=2e-4, rtol=1e-4)
        with pytest.raises(InvalidRequestError, match=r"65 tokens, but .* of max_num_batched_tokens 64"):
            llm.encode([[5] * 65])
        [again] = llm.encode([prompts[1]])
        assert again.num_cached_tokens == 0
        assert llm.stats().num_preemptions == 0


@pytest.mark.usefixtures("toy_encoder")
def test_rows_of_an_encoder_are_alike_in_any_step(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    prompts = random_prompts([40, 7, 21, 40], vocab_size=384)
    with LLM(str(tmp_path), num_threads=1) as llm:
        together = encode(llm, prompts)
        alone = [encode(llm, [prompt])[0] for prompt in prompts]
    assert [row.tobytes() for row in together] == [row.tobytes() for row in alone]


@pytest.mark.usefixtures("toy_encoder")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": "memory"}, r"KVTierConfig\.kv_tier is 'memory', but no KV of a prompt can be used"),
        ({"use_sparse_attention": True}, r"SchedulerConfig\.use_sparse_attention is True, but no KV"),
        (
            {"tensor_parallel_size": 2},
            r"tensor_parallel_size is 2, but ToyEncoder has attention to later tokens",
        ),
    ],
)
def test_what_needs_kv_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_encoder(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **options)


@pytest.mark.usefixtures("toy_encoder")
def test_a_model_that_is_not_causal_cannot_generate(tmp_path: Path) -> None:
    make_encoder(tmp_path, generates=True)
    with pytest.raises(ModelError, match="ToyEncoder has layers that are not causal"):
        LLM(str(tmp_path))


@pytest.mark.usefixtures("toy_encoder")
def test_a_family_says_how_it_is_pooled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"pooling_type": ""}))
    with pytest.raises(ModelError, match="the pooling of the family toy_encoder has no pooling_type"):
        read_model_config(tmp_path)


# -- ranks and processes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pooled_qwen3")
def test_ranks_compute_the_same_states(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = read_model_config(tmp_path)
    [prompt] = random_prompts([20], vocab_size=config.vocab_size)
    ranks = LockstepRanks(2)
    decoders = ranks.load(tmp_path, config)

    def hidden_of(decoder: Decoder) -> torch.Tensor:
        assert decoder.output is None
        return PagedHarness(decoder, [20]).step([0], [0], [prompt])

    whole = hidden_of(load_decoder(tmp_path, config))
    for found in ranks.run(lambda each: hidden_of(decoders[each.shard.rank])):
        torch.testing.assert_close(found, whole, atol=2e-4, rtol=0)


POOLED_QWEN3 = """
import dataclasses
from quire.models.checkpoints.loading import load_decoder
from quire.models.decoder import Decoder
from quire.models.families import FAMILIES
from quire.pooling_params import PoolingParams

family = FAMILIES["qwen3"]
pooling = PoolingParams(pooling_type="mean", normalize=True)
specialize = lambda hf, base: dataclasses.replace(family.specialize(hf, base), pooling=pooling)
FAMILIES["qwen3"] = dataclasses.replace(family, specialize=specialize)
"""


@pytest.mark.processes
async def test_an_engine_process_pools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(make_checkpoint("qwen3", tmp_path / "model"))
    (tmp_path / "sitecustomize.py").write_text(POOLED_QWEN3)  # what an engine runs first
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scheduler = SchedulerConfig(num_kv_blocks=32, block_size=16, max_num_batched_tokens=16)
    llm = AsyncLLM(EngineConfig(model=path, num_threads=1, scheduler=scheduler))

    async def row(prompt: list[int]) -> PoolingRequestOutput:
        [output] = [output async for output in llm.encode(prompt)]
        return output

    try:
        prompts = random_prompts([40, 3, 17], vocab_size=384)
        together = await asyncio.gather(*map(row, prompts))
        for prompt, output in zip(prompts, together, strict=True):
            assert output.outputs.data.tobytes() == (await row(prompt)).outputs.data.tobytes()
            assert np.linalg.norm(output.outputs.data) == pytest.approx(1.0, rel=1e-6)
        cancelled = asyncio.create_task(row([5] * 400))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert (await row(prompts[1])).outputs.data.tobytes() == together[1].outputs.data.tobytes()
        assert llm.num_unfinished_requests == 0
        stats = await llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        with pytest.raises(InvalidRequestError, match="cannot generate"):
            _ = [output async for output in llm.generate("a")]
    finally:
        await llm.shutdown()
