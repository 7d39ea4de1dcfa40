"""A step on another device than the host: nothing is mixed, nobody waits, and one place brings logits back.

Every operator of the step runs on torch's meta device, see `meta_device`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_checkpoints import write_gguf
from step_driver import BLOCK_SIZE, MAX_MODEL_LEN, StepDriver

from checkpoints import FAMILIES, make_checkpoint
from lockstep_ranks import LockstepRanks
from meta_device import META, MadeUpCopy, MetaKernels, OneDevice
from quire.execution.model_runner import ModelRunner
from quire.execution.sampling import prompt_logprobs, tokens_in_flight
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.kernels.devices.device import to_device
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.state_cache import StateCache
from quire.kv.cache.state_layout import StateLayout
from quire.models.checkpoints import loading
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.decoder import Decoder
from quire.models.parallel import TensorParallel
from quire.models.rotary import RotaryTable
from quire.sampling_params import SamplingParams

COPIES_OF_A_FORWARD_PASS = 3  # positions, and by the kernels the blocks and offsets of tokens


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loading, "kernel_set", lambda name: MetaKernels())
    return lambda path: load_decoder(path, read_model_config(path))


def cache_of(model: Decoder, dtype: str = "float32", num_blocks: int = 64) -> PagedAttentionCache:
    metadata = PagedAttentionCacheMetaData.for_layers(
        model.config.kv_layers, page_size=BLOCK_SIZE, dtype=dtype, num_pages=num_blocks
    )
    return PagedAttentionCache.on_device(metadata, META)


def states_of(model: Decoder, num_checkpoints: int = 0) -> StateCache:
    layout = StateLayout.of(model.config.state_layers, "float32")
    memory = torch.empty((2 + num_checkpoints) * layout.bytes_per_state, dtype=torch.uint8, device=META)
    return StateCache(layout, memory, num_slots=2)


def batch_of(model: Decoder, computed: list[int], counts: list[int]) -> AttentionBatch:
    tables = np.arange(len(counts) * 16).reshape(len(counts), 16)
    states = StepStates(np.arange(len(counts)), states_of(model).layers) if model.config.has_states else None
    return AttentionBatch.build(np.array(computed), np.array(counts), tables, BLOCK_SIZE, states=states)


def forward(model: Decoder, cache: PagedAttentionCache, computed: list[int], counts: list[int]) -> int:
    """Compute a step and its logits; return how many copies went to the device."""
    token_ids = torch.arange(sum(counts), device=META)
    with OneDevice() as watched:
        hidden = model.forward(token_ids, cache.views, batch_of(model, computed, counts))
        logits = model.logits(hidden[: len(counts)])
    assert hidden.device == logits.device == META
    assert hidden.shape == (sum(counts), model.config.hidden_size)
    assert logits.shape == (len(counts), model.config.vocab_size)
    return watched.num_copies


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama4"])
def test_a_forward_pass_stays_on_its_device(load: Any, family: str, dtype: str, tmp_path: Path) -> None:
    model = load(make_checkpoint(family, tmp_path))
    cache = cache_of(model, dtype)
    forward(model, cache, [0, 0], [5, 17])  # rotary tables grow
    assert forward(model, cache, [5, 17], [1, 30]) == COPIES_OF_A_FORWARD_PASS
    assert forward(model, cache, [6, 47], [1, 1]) == COPIES_OF_A_FORWARD_PASS


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen3_moe"])
def test_what_ranks_compute_together_stays_on_their_devices(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    ranks = LockstepRanks(2)
    models = ranks.load(path, read_model_config(path))

    def copies(parallel: TensorParallel) -> int:
        model = models[parallel.shard.rank]
        cache = cache_of(model)
        forward(model, cache, [0, 0], [5, 17])
        return forward(model, cache, [5, 17], [1, 30])

    assert ranks.run(copies) == [COPIES_OF_A_FORWARD_PASS] * 2


def test_embeddings_of_a_gguf_file_are_decoded_once(load: Any, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    file, _ = write_gguf(make_checkpoint("qwen3", tmp_path / "model", **shape), "qwen3", "Q8_0")
    model = load(file)
    forward(model, cache_of(model), [0], [3])
    assert forward(model, cache_of(model), [3], [1]) == COPIES_OF_A_FORWARD_PASS


class WatchedRunner:
    """Runs steps of a runner under `OneDevice`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_copies: list[int] = []

    def execute(self, *args: Any) -> Any:
        with OneDevice() as watched:
            result = self.runner.execute(*args)
        self.num_copies.append(watched.num_copies)
        return result


@pytest.fixture
def driver(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepDriver:
    model = load(make_checkpoint("qwen3", tmp_path))
    cache = cache_of(model)
    runner = ModelRunner(model, [cache], max_num_seqs=4, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    for module in (tokens_in_flight, prompt_logprobs):
        monkeypatch.setattr(module, "HostCopy", MadeUpCopy)
    return StepDriver(WatchedRunner(runner), cache, max_num_seqs=4)


def test_a_step_copies_what_its_tokens_are_chosen_by(driver: StepDriver) -> None:
    driver.add("greedy", [5, 6, 7], SamplingParams(temperature=0.0))
    driver.add("drawn", list(range(30, 50)), SamplingParams(seed=1, top_p=0.9, logprobs=2))
    driver.run(4, chunk=9)
    assert all(len(request.output) == 4 for request in driver.requests.values())
    assert len(driver.requests["drawn"].logprobs) == 4
    # Beside those of the forward pass the token ids, which tokens are sampled after, how, for which slots,
    # and which of them report log-probabilities.
    assert driver.runner.num_copies[-1] == COPIES_OF_A_FORWARD_PASS + 5


def test_log_probabilities_of_a_prompt_are_found_on_the_device(driver: StepDriver) -> None:
    driver.add("before", [3], SamplingParams(temperature=0.0))
    driver.step({"before": 1})  # rotary tables grow
    driver.add("prompt", [5, 6, 7, 8], SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.step({"prompt": 4})
    assert len(driver.requests["prompt"].prompt_logprobs) == 3
    assert driver.runner.num_copies[-1] == COPIES_OF_A_FORWARD_PASS + 4  # no draws; which tokens follow


def test_blocks_are_copied_on_the_device(load: Any, tmp_path: Path) -> None:
    cache = cache_of(load(make_checkpoint("qwen3", tmp_path)))
    with OneDevice() as watched:
        cache.copy_blocks(np.array([[0, 1], [2, 3]], dtype=np.int32))
    assert watched.num_copies == 1


def test_states_are_copied_on_the_device(load: Any, tmp_path: Path) -> None:
    states = states_of(load(make_checkpoint("lfm2", tmp_path)), num_checkpoints=2)
    copies = np.array([[0, 1]], dtype=np.int32)
    with OneDevice() as watched:
        states.fork(copies)
        states.save(copies)
        states.restore(copies)
    assert watched.num_copies == 1  # of the numbers of those that are forked


def _ask_for_the_last_position(self: RotaryTable, positions: torch.Tensor, *, last: int) -> Any:
    return _ROWS(self, positions, last=int(positions.max()))


def _look_up_on_the_host(self: RotaryTable, positions: torch.Tensor, *, last: int) -> Any:
    return _ROWS(self, torch.arange(len(positions)), last=last)


def _copy_again(self: RotaryTable, positions: torch.Tensor, *, last: int) -> Any:
    return _ROWS(self, to_device(torch.arange(len(positions)), META), last=last)


_ROWS = RotaryTable.rows


@pytest.mark.parametrize(
    "rows", [_ask_for_the_last_position, _look_up_on_the_host, _copy_again], ids=["waits", "mixes", "copies"]
)
def test_what_would_wait_or_mix_is_seen(
    load: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_checkpoint("qwen3", tmp_path))
    cache = cache_of(model)
    forward(model, cache, [0], [3])
    monkeypatch.setattr(RotaryTable, "rows", rows)
    with pytest.raises((RuntimeError, AssertionError)):
        assert forward(model, cache, [3], [1]) == COPIES_OF_A_FORWARD_PASS
