"""Sparse prefill through the whole engine."""

import pytest

from quire import (
    LLM,
    CacheEvictionConfig,
    SamplingParams,
    SparseAttentionConfig,
    SparseAttentionMode,
)

TEXT = "Quire pages its KV cache in blocks and computes prompts in chunks, beside other requests. " * 14
LENGTHS = [400, 33, 290, 120]
TRISHAPE = SparseAttentionConfig(
    num_last_dense_tokens_in_prefill=20,
    num_retained_start_tokens_in_cache=32,
    num_retained_recent_tokens_in_cache=64,
)
XATTENTION = SparseAttentionConfig(
    mode=SparseAttentionMode.XATTENTION, num_last_dense_tokens_in_prefill=20, xattention_threshold=0.3
)
MODES = {"trishape": TRISHAPE, "xattention": XATTENTION}


def answers(config, *, one_by_one=False, **options):
    """Return tokens and log-probabilities, to the bit."""
    chosen = {} if config is None else {"use_sparse_attention": True, "sparse_attention_config": config}
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=3)
    settings = {"num_kv_blocks": 256, "long_prefill_token_threshold": 128, "max_num_batched_tokens": 2048}
    with LLM("mini", **{**settings, **chosen, **options}) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)
        prompts = [token_ids[start : start + length] for start, length in enumerate(LENGTHS)]
        batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        outputs = [output.outputs[0] for batch in batches for output in llm.generate(batch, params)]
    return [
        (output.token_ids, [{t: e.logprob.hex() for t, e in p.items()} for p in output.logprobs])
        for output in outputs
    ]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_the_same_size_have_the_same_bits_in_company(mode):
    together, dense = answers(MODES[mode]), answers(None)
    assert answers(MODES[mode], one_by_one=True) == together
    assert together[0] != dense[0]
    assert together[1] == dense[1]  # too short to leave anything out


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mode", MODES)
def test_native_kernels_and_the_reference_answer_the_same(mode):
    native = answers(MODES[mode], dtype="float32")
    reference = answers(MODES[mode], dtype="float32", kernels="reference")
    assert [tokens for tokens, _ in native] == [tokens for tokens, _ in reference]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mode", MODES)
def test_what_leaves_nothing_out_has_the_bits_of_dense_attention(mode):
    everything = SparseAttentionConfig(
        mode=mode, num_retained_recent_tokens_in_cache=512, num_last_dense_tokens_in_prefill=512
    )
    assert answers(everything) == answers(None)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("mode", MODES)
def test_together_with_cache_eviction(mode, window):
    eviction = CacheEvictionConfig(
        start_size=16, recent_size=32, max_cache_size=96, snapkv_window_size=window
    )
    options = {"use_cache_eviction": True, "cache_eviction_config": eviction}
    together = answers(MODES[mode], **options)
    assert answers(MODES[mode], one_by_one=True, **options) == together
    assert together[0] != answers(MODES[mode])[0]
