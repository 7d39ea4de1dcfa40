"""Engines on a GPU that share KV: a prompt that one computes is continued by another with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from quire import LLM, SamplingParams
from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import DeviceMemory
from quire.datadist.enums import DataType
from quire.kernels.triton.device import is_interpreted

NUM_BYTES = 1 << 12 if is_interpreted else 64 << 20


def test_copies_do_not_wait_for_steps() -> None:
    device = torch.device("cpu") if is_interpreted else torch.device("cuda", 0)
    cache = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device=device)
    expected = cache.cpu().clone()
    stream = None if is_interpreted else torch.cuda.Stream()  # type: ignore[no-untyped-call]
    memory = DeviceMemory(CacheDesc(1, [NUM_BYTES], DataType.DT_INT8), device, [cache], stream=stream)
    if not is_interpreted:
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # a step, of half a second or more
        end = torch.cuda.Event()
        end.capture()
    part = NUM_BYTES // 8
    [read] = memory.outgoing([(0, part, part), (0, 5 * part, part)])
    assert bytes(read[:part]) == expected[part : 2 * part].numpy().tobytes()
    assert bytes(read[part:]) == expected[5 * part : 6 * part].numpy().tobytes()
    window = [(0, 0, part), (0, 7 * part, part)]
    views = memory.incoming(window)
    views[0][:] = read
    memory.arrived(window, views)
    memory.synchronize()
    if not is_interpreted:
        assert not end.query(), "nobody has waited for the step"
        torch.cuda.synchronize()
    expected[:part], expected[7 * part :] = expected[part : 2 * part], expected[5 * part : 6 * part]
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("transport", ["tcp"] if is_interpreted else ["tcp", "shared_memory"])
def test_a_prompt_is_computed_here_and_continued_there(transport: str, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint("qwen3", tmp_path / "model", dtype="bfloat16"))
    prompt = [7 + (11 * place) % 300 for place in range(35)]
    options = {
        "kernels": "triton",
        "block_size": 16,
        "max_model_len": 64,
        "max_num_seqs": 1,
        "num_kv_blocks": 8,
        "kv_transports": transport,
        "kv_transfer_token": "secret",
    }

    def answer(llm: LLM, max_tokens: int, transfer: dict[str, object] | None) -> tuple[object, ...]:
        how = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
        [output] = llm.generate([prompt], how, kv_transfer_params=transfer)
        completion = output.outputs[0]
        return completion.token_ids, completion.cumulative_logprob, output.kv_transfer_params

    with LLM(checkpoint, role="prefill", **options) as first:
        expected = answer(first, 4, None)
        assert first.reset_prefix_cache()
        with LLM(checkpoint, role="decode", **options) as second:
            _, _, transfer = answer(first, 1, {"do_remote_decode": True})
            assert answer(second, 4, transfer) == expected
            assert second.stats().num_loaded_tokens == 34
            assert second.stats().num_failed_loads == 0
