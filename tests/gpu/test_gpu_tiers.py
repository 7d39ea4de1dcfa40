"""KV tiers and connectors of an engine on a GPU: blocks come back as they were saved, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from late_device import LateDevice
from memory_connector import MemoryConnector
from quire import LLM, SamplingParams
from quire.kernels.devices.cuda_copies import CudaCopies
from quire.kernels.triton.device import is_interpreted
from quire.kv.tiers import block_copier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.device_copier import DeviceCopier
from quire.kv.tiers.tier import MemoryTier

NUM_BLOCKS, BLOCK_BYTES = (8, 4096) if is_interpreted else (256, 2 << 20)


def test_blocks_are_saved_and_loaded_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", NUM_BLOCKS // 2 * BLOCK_BYTES)
    where = "cpu" if is_interpreted else "cuda"
    cache = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=where)
    expected = cache.cpu().clone()
    copier: DeviceCopier = DeviceCopier(
        [cache], LateDevice(is_eager=True) if is_interpreted else CudaCopies()
    )
    began = copier.mark()
    saved = list(range(0, NUM_BLOCKS, 2))
    copies = copier.copy_out([(block,) for block in saved])
    assert len(copies) == len(saved)
    cache.zero_()  # the next step, asked for before a copy has ended
    after = copier.mark()
    buffer = copier.buffer()
    for block, copy in zip(saved, copies, strict=True):
        assert (copy.content() == expected[block].numpy()).all()
        buffer[:] = copy.content()
        copier.copy_in((block + 1,), buffer, after).wait()
        copy.release()
    assert torch.equal(cache[1::2].cpu(), expected[::2])
    assert not cache[::2].any()
    seconds = after.seconds_since(began)
    assert seconds is not None
    assert seconds > 0


class SlowConnector(MemoryConnector):
    """Loads asynchronously."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, load_steps=2)


class OwnTier(TierConnector):
    """A tier of one's own."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, lambda num_bytes: MemoryTier(1 << 30, num_bytes, min_uses=1))


WAYS = [
    {"kv_tier": "memory"},
    {"kv_tier": "disk"},
    {"kv_connector": "memory_connector.MemoryConnector"},
    {"kv_connector": "test_gpu_tiers.SlowConnector"},
    {"kv_connector": "layer_connector.LayerConnector"},
    {"kv_connector": "test_gpu_tiers.OwnTier"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_the_cache_forgot_is_loaded_with_the_same_bits(way: dict[str, str], tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16")
    prompts = [[7 + (11 * number + 3 * place) % 300 for place in range(33)] for number in range(3)]
    how = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    options = {**way, "kv_tier_path": str(tmp_path), "kv_tier_min_uses": 1, "num_kv_blocks": 4}
    answers = []
    with LLM(
        str(checkpoint), kernels="triton", block_size=16, max_model_len=64, max_num_seqs=1, **options
    ) as llm:
        for prompt in prompts * 4:
            [output] = llm.generate([prompt], how)
            answers.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
        assert llm.stats().num_loaded_tokens > 0
    assert answers == answers[:3] * 4
