"""The same request has the same logits, bit for bit, whatever the batch, the chunking and the blocks."""

from __future__ import annotations

import pytest
import torch

from checkpoints import make_checkpoint
from paged_harness import Generated, PagedHarness, generate, random_prompts
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder

FAMILIES = ["llama-3.1", "qwen3", "gemma3", "smollm2", "olmo2", "qwen3_moe", "lfm2", "qwen3_5"]
FAMILIES += ["ministral3", "gpt_oss", "granitemoehybrid", "falcon_h1", "nemotron_h", "kimi_linear"]
FAMILIES += ["zamba2"]
# Layer norms and parallel blocks; xIELU; norms after the rotation; and ways of choosing experts.
OTHER_LAYERS = ["phi", "cohere2", "apertus", "hunyuan_v1_dense", "qwen2_moe", "glm4_moe", "phimoe"]
GEMMA4 = ["gemma4", "gemma4_unified", "gemma4-experts"]
OTHER_LAYERS += ["qwen3_next", "olmo_hybrid", "lfm2_moe", "mimo_v2_flash", "llama4"]
PROMPT_LENGTHS = [1, 7, 66, 131]
NUM_NEW = 6


VARIANTS = [(family, dtype, "none", "native") for family in FAMILIES for dtype in ("float32", "bfloat16")]
VARIANTS += [(family, "float16", "none", "native") for family in ("qwen3", "gemma3")]
VARIANTS += [
    (family, "bfloat16", quantization, "native")
    for family in ("qwen3", "gemma3", "qwen3_moe")
    for quantization in ("int8", "int4")
]
VARIANTS += [("qwen3", dtype, "none", "reference") for dtype in ("float32", "bfloat16")]
VARIANTS += [
    (family, "float32", "none", "reference") for family in ("granitemoehybrid", "kimi_linear", "zamba2")
]
VARIANTS += [(family, "bfloat16", "none", "native") for family in OTHER_LAYERS]
VARIANTS += [(family, "bfloat16", "none", "reference") for family in ("phi", "apertus", "glm4_moe")]
VARIANTS += [("phi", "bfloat16", "int8", "native"), ("glm4_moe", "bfloat16", "int4", "native")]
VARIANTS += [("deepseek_v3", dtype, "none", "native") for dtype in ("float32", "bfloat16")]
VARIANTS += [("deepseek_v2", "bfloat16", "int4", "native"), ("minicpm3", "float16", "none", "native")]
VARIANTS += [(family, "bfloat16", "none", "native") for family in GEMMA4]
VARIANTS += [("gemma4", "float32", "none", "reference"), ("gemma4", "bfloat16", "int4", "native")]
VARIANTS += [("llama4", "float32", "none", "reference"), ("llama4", "bfloat16", "int4", "native")]
VARIANTS += [("minicpm3", dtype, "none", "reference") for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, dtype, quantization, kernels = request.param
    path = make_checkpoint(family, tmp_path_factory.mktemp(family), dtype=dtype)
    options = WeightOptions(dtype=dtype, quantization=quantization, group_size=16, kernels=kernels)
    return load_decoder(path, read_model_config(path), options=options)


@pytest.fixture(scope="module")
def prompts(decoder: Decoder) -> list[list[int]]:
    return random_prompts(PROMPT_LENGTHS, vocab_size=decoder.config.vocab_size)


@pytest.fixture(scope="module")
def alone(decoder: Decoder, prompts: list[list[int]]) -> list[Generated]:
    return [generate(decoder, [prompt], num_new=NUM_NEW)[0] for prompt in prompts]


def _assert_same_bits(generated: list[Generated], expected: list[Generated]) -> None:
    for one, other in zip(generated, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logits, other.logits)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("first_chunk", "chunk", "block_size"), [(None, 10_000, 8), (None, 64, 16), (None, 7, 5), (50, 1, 64)]
)
def test_together_and_chunked(
    decoder: Decoder,
    prompts: list[list[int]],
    alone: list[Generated],
    first_chunk: int | None,
    chunk: int,
    block_size: int,
) -> None:
    chunks = {"first_chunk": first_chunk, "chunk": chunk}
    together = generate(decoder, prompts, num_new=NUM_NEW, block_size=block_size, seed=chunk, **chunks)
    _assert_same_bits(together, alone)


@pytest.mark.formats
@pytest.mark.first_case
def test_in_a_batch_of_32(decoder: Decoder, prompts: list[list[int]], alone: list[Generated]) -> None:
    companions = random_prompts([3 + 4 * i for i in range(28)], vocab_size=decoder.config.vocab_size, seed=9)
    crowd = generate(decoder, companions[:9] + prompts + companions[9:], num_new=NUM_NEW, chunk=50)
    _assert_same_bits(crowd[9:13], alone)


@pytest.mark.formats
@pytest.mark.first_case
def test_all_prompt_logits_whatever_the_chunk(decoder: Decoder, prompts: list[list[int]]) -> None:
    prompt = prompts[-1]
    whole = decoder.logits(PagedHarness(decoder, [len(prompt)]).step([0], [0], [prompt])).clone()
    harness = PagedHarness(decoder, [len(prompt)], seed=4)
    parts = [
        decoder.logits(harness.step([0], [start], [prompt[start : start + 13]])).clone()
        for start in range(0, len(prompt), 13)
    ]
    assert torch.equal(torch.cat(parts), whole)
