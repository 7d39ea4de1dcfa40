"""KV connectors of one's own where a device chooses the tokens, which the host knows later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_checks import check_after_every_step, core_of
from insides import always_load, connector_of, wait_until_written
from late_device import LateDevice
from late_tensor import LateTensor
from late_tokens import choose_on_device
from layer_connector import LayerConnector
from memory_connector import MemoryConnector
from quire import LLM, SamplingParams
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.connectors.host_blocks import DeviceBlocks
from quire.kv.tiers import block_copier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.device_copier import DeviceCopier
from quire.kv.tiers.tier import MemoryTier

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[start + (7 * place) % 97 for place in range(6 * 16 + 3)] for start in (100, 200, 300, 400)]
SETTINGS: dict[str, Any] = {
    "num_threads": 1,
    "num_kv_blocks": 24,  # of which a prompt and its answer take seven
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
}


class BlockConnector(MemoryConnector):
    """Copies blocks through the host, as if the cache were in the memory of a device."""

    def register_kv_caches(self, kv_caches: PagedAttentionCache) -> None:
        on_device = LateTensor(LateDevice(is_eager=True), kv_caches.tensor)
        super().register_kv_caches(DeviceBlocks(SimpleNamespace(tensor=on_device)))


class SlowBlockConnector(BlockConnector):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, load_steps=2)


class OwnTier(TierConnector):
    """Copies blocks beside the steps, late."""

    def __init__(self, block_size: int) -> None:
        super().__init__(
            block_size,
            lambda num_bytes: MemoryTier(1 << 30, num_bytes, min_uses=1),
            copier_of=lambda caches, _: DeviceCopier(
                [cache.tensor for cache in caches], LateDevice(is_eager=True)
            ),
        )
        always_load(self)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY)
    connector = connector_of(llm)
    if isinstance(connector, TierConnector):
        wait_until_written(llm)
    return [(output.outputs[0].token_ids, str(output.outputs[0].logprobs)) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The answers of an engine without a connector."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose_on_device(monkeypatch)
        with LLM("mini", **SETTINGS) as llm:
            return answers(llm)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("connector", [BlockConnector, SlowBlockConnector, LayerConnector, OwnTier])
def test_a_connector_of_one_s_own_changes_no_token(
    connector: type, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown_tokens = choose_on_device(monkeypatch)
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 4 << 20)
    name = f"{connector.__module__}.{connector.__qualname__}"
    with LLM("mini", **SETTINGS, overlap_steps=True, kv_connector=name) as llm:
        check_after_every_step(core_of(llm))
        for _ in range(3):
            assert answers(llm) == expected
        stats = llm.stats()
    assert stats.num_loaded_tokens > 6 * 16
    assert stats.num_failed_loads == 0
    assert bool(sum(unknown_tokens)) is connector.saves_before_tokens, "others know who has failed"
