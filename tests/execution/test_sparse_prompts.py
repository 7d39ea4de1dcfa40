"""Which keys prompts leave out: rules against plain loops, and a model against transformers with a mask."""

import numpy as np
import pytest
import torch
from step_driver import BLOCK_SIZE, make_driver

from checkpoints import make_model
from quire.config import SparseAttentionConfig
from quire.execution.sparse_prefill import SparsePrefill
from quire.sampling_params import SamplingParams

START, RECENT, LAST_DENSE = 8, 12, 10
TRISHAPE = SparseAttentionConfig(
    num_retained_start_tokens_in_cache=START,
    num_retained_recent_tokens_in_cache=RECENT,
    num_last_dense_tokens_in_prefill=LAST_DENSE,
)
GREEDY = SamplingParams(temperature=0.0, logprobs=5)


def skipped_by_a_chunk(computed, count, prompt, block_size=BLOCK_SIZE):
    """The places that a chunk skips, as the specification says it."""
    full_blocks = computed // block_size
    if prompt - (computed + count) < LAST_DENSE:
        return set()
    if full_blocks <= START // block_size + RECENT // block_size:
        return set()
    skipped = range(START // block_size, full_blocks - RECENT // block_size)
    return {block * block_size + i for block in skipped for i in range(block_size)}


def test_trishape_skips_the_blocks_between():
    rng = np.random.default_rng(0)
    computed, count = rng.integers(0, 70, 300), rng.integers(1, 30, 300)
    prompt = np.maximum(rng.integers(1, 120, 300), 1)
    skipped = SparsePrefill(TRISHAPE, BLOCK_SIZE).skipped_keys(computed, count, prompt)
    for row in range(300):
        expected = skipped_by_a_chunk(computed[row], count[row], prompt[row])
        assert set(range(skipped.start[row], skipped.end[row])) == expected
    assert skipped.is_any.sum() > 30


def test_trishape_of_short_prompts_and_of_generation_skips_nothing():
    sparse = SparsePrefill(TRISHAPE, BLOCK_SIZE)
    assert sparse.skipped_keys(np.array([90, 20]), np.array([1, 9]), np.array([90, 100])) is None
    config = SparseAttentionConfig(mode="xattention")
    assert SparsePrefill(config, BLOCK_SIZE).skipped_keys(*np.array([[90], [1], [200]])) is None


@pytest.mark.parametrize(
    ("computed", "count", "prompt", "end"),
    [
        (0, 512, 2000, 512),  # a chunk before the last dense tokens
        (512, 388, 1000, 900),  # one that ends where they begin
        (512, 400, 1000, None),  # one that ends inside them
        (512, 488, 1000, 896),  # the one that ends the prompt: query blocks before the last dense tokens
        (0, 1000, 1000, 896),  # also in one step
        (0, 1003, 1000, 896),  # computed again with three tokens of output
        (960, 40, 1000, None),
        (1000, 1, 1000, None),  # generation
        (0, 60, 60, None),  # nothing but dense tokens
    ],
)
def test_xattention_selects_before_the_last_dense_tokens(computed, count, prompt, end):
    sparse = SparsePrefill(SparseAttentionConfig(mode="xattention"), BLOCK_SIZE)
    selection = sparse.key_selection(*np.array([[computed], [count], [prompt]]))
    assert selection is None if end is None else selection.end.tolist() == [end]


def sparse_places(computed, count, prompt, last_dense, size=64):
    """The places of a chunk that select their keys, as the specification says it."""
    after = computed + count
    if after < prompt:
        return set() if prompt - after < last_dense else set(range(computed, after))
    dense_blocks = {place // size for place in range(max(prompt - last_dense, 0), prompt)}
    return {place for place in range(computed, prompt) if place // size not in dense_blocks}


@pytest.mark.parametrize("last_dense", [0, 1, 64, 100])
def test_xattention_is_dense_in_query_blocks_with_one_of_the_last_dense_tokens(last_dense):
    rng = np.random.default_rng(last_dense)
    computed, count, prompt = rng.integers(0, 500, 300), rng.integers(1, 300, 300), rng.integers(1, 600, 300)
    count[::3] = np.maximum(prompt - computed, 1)[::3]  # many chunks that end their prompts
    sparse = SparsePrefill(
        SparseAttentionConfig(mode="xattention", num_last_dense_tokens_in_prefill=last_dense), BLOCK_SIZE
    )
    end = sparse.key_selection(computed, count, prompt).end
    for row in range(300):
        found = range(computed[row], min(end[row], computed[row] + count[row]))
        assert set(found) == sparse_places(computed[row], count[row], prompt[row], last_dense)


def test_a_threshold_of_zero_is_dense():
    sparse = SparsePrefill(SparseAttentionConfig(mode="xattention", xattention_threshold=0.0), BLOCK_SIZE)
    assert sparse.key_selection(*np.array([[0], [512], [2000]])) is None


@pytest.mark.parametrize("chunk", [5, 9, 16])
def test_trishape_is_dense_attention_under_its_mask(models, chunk):
    prompts = [np.random.default_rng(length).integers(3, 380, length).tolist() for length in (90, 61, 13)]
    driver = make_driver(models["float32"], sparse_attention=TRISHAPE)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, GREEDY)
    driver.run(1, chunk=chunk)
    model = make_model("qwen3")
    num_hidden = 0
    for index, prompt in enumerate(prompts):
        mask = torch.ones(len(prompt), len(prompt)).tril() == 1
        for start in range(0, len(prompt), chunk):
            count = min(chunk, len(prompt) - start)
            hidden = sorted(skipped_by_a_chunk(start, count, len(prompt)))
            mask[start : start + count, hidden] = False
            num_hidden += len(hidden)
        expected = logprobs_after(model, prompt, mask)
        request = driver.requests[str(index)]
        assert request.output == [int(expected.argmax())]
        [reported] = request.logprobs
        of_tokens = expected[reported.token_ids].tolist()
        assert reported.logprobs == pytest.approx(of_tokens, abs=1e-4)
    assert num_hidden > 0


def logprobs_after(model, prompt, mask):
    """The log-probabilities of the token after `prompt`; `mask` [n, n] says which keys are seen."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), attention_mask=bias[None, None]).logits
    return logits[0, -1].log_softmax(-1)
