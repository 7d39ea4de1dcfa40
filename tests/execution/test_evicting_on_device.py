"""Cache eviction on another device than the host: scores come back once, and keys change where they are.

Every operator of a step runs on torch's meta device, see `meta_device`; the numbers that come back are the
test's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache_evictor import BLOCK_SIZE, PROMPT, SIZES, run

from checkpoints import make_checkpoint
from meta_device import META, MadeUpCopy, MetaKernels, OneDevice
from quire.config import AdaptiveRKVConfig, CacheEvictionConfig, SchedulerConfig
from quire.execution.eviction import cache_evictor, evicted_keys
from quire.execution.model_runner import ModelRunner
from quire.execution.sampling import tokens_in_flight
from quire.kernels.attention.batch import AttentionBatch
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.models.checkpoints import loading
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.decoder import Decoder
from quire.scheduling import Scheduler

NUM_OUTPUT = 20
BY_KEYS = AdaptiveRKVConfig(attention_mass=0.1)


class Watched:
    """Stands for copies to the host, and notes what happens.

    A pass begins or ends, attention writes the scores of a layer, a copy is begun or waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.generator = torch.Generator().manual_seed(0)
        watched, forward = self, Decoder.forward

        class Copy:
            def __init__(self, tensor: torch.Tensor) -> None:
                assert tensor.device == META
                self.shape, self.dtype = tensor.shape, tensor.dtype
                watched.events.append("copy")

            def wait(self) -> torch.Tensor:
                watched.events.append("wait")
                numbers = torch.rand(self.shape, generator=watched.generator)
                return numbers if self.dtype.is_floating_point else (numbers * 2**32).to(self.dtype)

        def watch_forward(*args: Any, **options: Any) -> torch.Tensor:
            watched.events.append("begin")
            hidden = forward(*args, **options)
            watched.events.append("end")
            return hidden

        for module in (cache_evictor, evicted_keys):
            monkeypatch.setattr(module, "HostCopy", Copy)
        monkeypatch.setattr(Decoder, "forward", watch_forward)
        monkeypatch.setattr(tokens_in_flight, "HostCopy", MadeUpCopy)
        monkeypatch.setattr(MetaKernels, "paged_attention", self.attention(MetaKernels.paged_attention))

    def attention(self, paged_attention: Any) -> Any:
        def scored(kernels: Any, query: Any, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
            scores = batch.key_scores
            if scores is not None:
                assert scores.rows.device == scores.sums.device == META
                assert len(scores.layer_rows) == len(scores.layer_sums) == 2
                scores.clear()
                self.events.append(str(scores.layer))
            return paged_attention(kernels, query, kv, batch, **options)

        return scored


class OnOneDevice:
    """A runner whose steps are under `OneDevice`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_copies: list[int] = []

    def execute(self, *args: Any) -> Any:
        with OneDevice() as watched:
            result = self.runner.execute(*args)
        self.num_copies.append(watched.num_copies)
        return result


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("options", "dtype", "num_copies"),
    [
        ({}, "float32", 1),  # what moves, in all layers
        ({"apply_rotation": True}, "float32", 2),  # and what turns
        (
            {"aggregation_mode": "adaptive_rkv", "adaptive_rkv_config": BY_KEYS},
            "int8",
            3,
        ),  # and which keys are compared, of each layer
    ],
    ids=["sums", "rotation", "keys"],
)
def test_scores_come_to_the_host_once_after_a_pass_and_keys_change_on_the_device(
    options: dict[str, Any], dtype: str, num_copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "kernel_set", lambda name: MetaKernels())
    path = make_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    model = load_decoder(path, read_model_config(path))
    watched = Watched(monkeypatch)
    eviction = CacheEvictionConfig(**SIZES, **options)
    metadata = PagedAttentionCacheMetaData.for_layers(
        model.config.kv_layers, page_size=BLOCK_SIZE, dtype=dtype, num_pages=64
    )
    runner = OnOneDevice(
        ModelRunner(
            model,
            [PagedAttentionCache.on_device(metadata, META)],
            max_num_seqs=8,
            max_model_len=256,
            block_size=BLOCK_SIZE,
            eviction=eviction,
        )
    )
    config = SchedulerConfig(
        block_size=BLOCK_SIZE, use_cache_eviction=True, cache_eviction_config=eviction, max_num_seqs=8
    ).validate()
    scheduler = Scheduler(config, num_blocks=64, max_model_len=256)
    run(scheduler, runner, PROMPT, NUM_OUTPUT)
    assert scheduler.make_stats().num_evicted_blocks > 0
    steps = " ".join(watched.events).split("begin")[1:]
    assert len(steps) == NUM_OUTPUT
    for events in steps:
        assert events.split()[:7] == ["0", "1", "copy", "copy", "end", "wait", "wait"]  # of rows and sums
    fetched = [events.split()[7:] for events in steps]
    if options.get("aggregation_mode") == "adaptive_rkv":
        evicting = [events for events in fetched if events]
        assert len(evicting) == 1 + (NUM_OUTPUT - 1 + len(PROMPT) % BLOCK_SIZE) // BLOCK_SIZE
        assert set(map(tuple, evicting)) == {("copy", "copy", "wait", "wait") * 2}  # numbers, scales
    else:
        assert not any(fetched)
    assert max(runner.num_copies[1:]) == min(runner.num_copies) + num_copies
