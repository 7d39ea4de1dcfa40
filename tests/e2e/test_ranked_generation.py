"""Beam search and best_of through the whole engine, against transformers and against plain sampling."""

from __future__ import annotations

import math

import pytest
import torch

from checkpoints import make_model, save_checkpoint
from quire import LLM, SamplingParams

PROMPTS = [[5, 17, 40, 8], [300, 12], list(range(60, 100)), [201, 4, 4, 90, 17]]
ENDING = [2, 61, 130, 200]  # end-of-sequence, and stop tokens


@pytest.fixture(scope="module")
def model():
    return make_model("llama", seed=3)


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    path = save_checkpoint(model, tmp_path_factory.mktemp("checkpoint"))
    with LLM(str(path), num_kv_blocks=128, num_threads=1, max_num_seqs=16) as llm:
        yield llm


def up_to_the_end(tokens: list[int]) -> list[int]:
    """Return the tokens without the padding after the first one that ends them."""
    end = next((place for place, token in enumerate(tokens) if token in ENDING), len(tokens))
    return tokens[: end + 1]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("width", "n", "length_penalty"), [(4, 4, 1.0), (3, 1, 0.0)])
def test_beam_search_equals_transformers(model, llm, width, n, length_penalty):
    params = SamplingParams(
        beam_width=width, n=n, length_penalty=length_penalty, max_tokens=20, stop_token_ids=tuple(ENDING[1:])
    )
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = llm.generate([*PROMPTS, *PROMPTS], [*[params] * len(PROMPTS), *[plain] * len(PROMPTS)])
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            num_beams=width,
            num_return_sequences=n,
            length_penalty=length_penalty,
            early_stopping=False,
            eos_token_id=ENDING,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        completions = output.outputs
        assert [one.token_ids for one in completions] == [
            up_to_the_end(row[len(prompt) :].tolist()) for row in found.sequences
        ]
        scores = [one.cumulative_logprob / len(one.token_ids) ** length_penalty for one in completions]
        assert scores == pytest.approx(found.sequences_scores.tolist(), rel=1e-4)


def test_best_of_returns_the_likeliest_of_the_same_samples(llm):
    common = {"seed": 11, "max_tokens": 8, "ignore_eos": True}
    (everything,) = llm.generate(PROMPTS[0], SamplingParams(n=6, logprobs=0, **common))
    (best,) = llm.generate(PROMPTS[0], SamplingParams(n=2, best_of=6, **common))
    ranked = sorted(everything.outputs, key=lambda one: one.cumulative_logprob, reverse=True)
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    for one in everything.outputs:
        summed = math.fsum(
            entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        )
        assert one.cumulative_logprob == pytest.approx(summed)
