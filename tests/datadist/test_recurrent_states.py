"""The states of recurrent layers as a cache of slots, beside the KV in blocks: answers go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sides import PATIENT, cluster_info, start_decoder, start_prompt

from checkpoints import make_checkpoint
from paged_harness import PagedHarness
from quire.datadist import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, KvCache, LLMDataDist
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder

LENGTHS = 30, 17
NUM_NEW = 6
BLOCK_SIZE = 4
KEY = BlocksCacheKey(1)
FAMILIES = [
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.formats) for name in ("qwen3_5", "granitemoehybrid")),
]


class Side:
    """A model with KV and states of its own, whose memory is registered."""

    def __init__(self, path: Path, dist: LLMDataDist, key: BlocksCacheKey, seed: int) -> None:
        self.decoder = load_decoder(path, read_model_config(path))
        lengths = [max(LENGTHS) + NUM_NEW] * len(LENGTHS)
        self.harness = PagedHarness(self.decoder, lengths, block_size=BLOCK_SIZE, seed=seed)
        cache, states, manager = self.harness.kv_cache, self.harness.states.states, dist.kv_cache_manager
        desc = CacheDesc(1, [len(cache.tensor), cache.bytes_per_block], DataType.DT_UINT8)
        self.blocks = manager.register_blocks_cache(desc, [cache.tensor.data_ptr()], key)
        desc = CacheDesc(1, list(states.shape), DataType.DT_UINT8)
        self.states: KvCache = manager.register_cache(desc, [states.data_ptr()])

    def blocks_of(self, sequence: int, num_tokens: int) -> list[int]:
        table = self.harness.block_tables[sequence]
        return table[: -(-num_tokens // BLOCK_SIZE)].tolist()

    def go_on(self, sequence: int, tokens: list[int], computed: int, count: int) -> list[torch.Tensor]:
        """Compute what is missing and add `count` tokens; return the logits of each."""
        logits = []
        for _ in range(count):
            hidden = self.harness.step([sequence], [computed], [tokens[computed:]])
            computed = len(tokens)
            logits.append(self.decoder.logits(hidden[-1:]).clone())
            tokens.append(int(logits[-1].argmax()))
        return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pushes", [False, True], ids=["pulled", "pushed"])
def test_a_sequence_goes_on_where_its_blocks_and_its_state_have_gone(tmp_path, family, pushes):
    path = make_checkpoint(family, tmp_path, max_position_embeddings=512)
    source, target = start_prompt(1), start_decoder(2)
    try:
        peer = cluster_info(source.cluster_id, source.listen_port)
        target.link_clusters([peer], timeout=PATIENT)
        here = Side(path, source, KEY, seed=1)
        there = Side(path, target, BlocksCacheKey(2), seed=2)
        for sequence, length in enumerate(LENGTHS):
            prompt = torch.randint(5, 90, (length,), generator=torch.manual_seed(length)).tolist()
            [first] = here.go_on(sequence, prompt, 0, 1)
            blocks = here.blocks_of(sequence, length), there.blocks_of(1 - sequence, length)
            if pushes:
                manager = source.kv_cache_manager
                manager.push_blocks(BlocksCacheKey(2), here.blocks, *blocks)
                slot = CacheKeyByIdAndIndex(2, there.states.cache_id, 1 - sequence)
                manager.push_cache(slot, here.states, sequence)
            else:
                manager = target.kv_cache_manager
                manager.pull_blocks(KEY, there.blocks, *blocks)
                slot = CacheKeyByIdAndIndex(1, here.states.cache_id, sequence)
                manager.pull_cache(slot, there.states, batch_index=1 - sequence)
            moved = there.go_on(1 - sequence, list(prompt), length, NUM_NEW - 1)
            stayed = here.go_on(sequence, list(prompt), length, NUM_NEW - 1)
            assert first.isfinite().all()
            assert torch.equal(torch.cat(moved), torch.cat(stayed))
    finally:
        target.finalize()
        source.finalize()
