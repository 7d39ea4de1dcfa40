"""The memory plan of an engine on a GPU, by what its steps were seen to take: a stand-in counts them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from counted_memory import CountedMemory
from encoders import make_encoder, save_encoder
from host_choice import HostChoice
from quire.config import EngineConfig, SchedulerConfig
from quire.engine import core
from quire.engine.core import EngineCore
from quire.engine.devices import on_cuda
from quire.engine.memory.byte_sizes import format_bytes
from quire.engine.memory.plan import plan_memory
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.execution import profile_run
from quire.kernels import dispatch
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.devices import device as devices
from quire.kernels.reference import ReferenceKernels
from quire.models.checkpoints import loading
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams

SIZE = 3 * 10**9
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=16)


class KernelsOfGpu(ReferenceKernels):
    name = "triton"
    sampling = HostChoice()


class ToldMemory:
    """Tells what a test says."""

    def __init__(self, num_available: int, peak: int) -> None:
        self.num_available = num_available
        self.peak = peak

    def begin_peak(self) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), max_position_embeddings=50_000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedMemory]:
    """The host's memory as that of a GPU, whose kernels are the reference's."""
    monkeypatch.setattr(core, "on_one_device", functools.partial(on_cuda, gpu_bytes=SIZE))
    for module in (dispatch, loading):
        monkeypatch.setattr(module, "kernel_set", lambda name: KernelsOfGpu())
    monkeypatch.setattr(devices, "cuda_name", lambda: "A GPU")
    with CountedMemory(SIZE) as memory:
        monkeypatch.setattr(devices, "CudaMemory", lambda: memory)
        monkeypatch.setattr(devices, "free_cuda_memory", lambda: memory.num_available)
        yield memory


def config_of(checkpoint: Path, **fields: Any) -> EngineConfig:
    fields = {"scheduler": SCHEDULER, "max_model_len": 256, **fields}
    return EngineConfig(model=str(checkpoint), cuda_graphs=False, dtype="float32", **fields)


def computed(config: EngineConfig, available_bytes: int = SIZE) -> Any:
    model = read_model_config(Path(config.model))
    return plan_memory(on_cuda(config, gpu_bytes=SIZE), model, available_bytes=available_bytes)


def started(config: EngineConfig) -> EngineCore:
    return EngineCore(config, Path(config.model))


def blocks_after(plan: Any, available_bytes: int, taken_bytes: int) -> int:
    """Return how many blocks nine tenths of the memory have room for."""
    return (available_bytes * 9 // 10 - taken_bytes) // plan.kv_bytes_per_block


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("share", "available"), [(0.5, SIZE), (1.5, SIZE), (0.5, SIZE * 2 // 3), (1.0, SIZE + 9**9)]
)
def test_the_plan_has_what_was_measured(
    gpu: CountedMemory,
    checkpoint: Path,
    share: float,
    available: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Less or more than was computed, and where the free memory is not what it was."""
    many = SchedulerConfig(max_num_seqs=4000, max_num_batched_tokens=64)
    config = config_of(checkpoint, max_model_len=50_000, scheduler=many)
    plan = computed(config)
    monkeypatch.setattr(profile_run, "profile_run", lambda runner, vocab_size, limits: 512)
    activations = int(plan.activation_bytes * share)
    small_cache = 16 * plan.kv_bytes_per_block
    told = ToldMemory(available, plan.weight_bytes + activations + small_cache)
    monkeypatch.setattr(devices, "CudaMemory", lambda: told)
    with caplog.at_level(logging.INFO):
        engine = started(config)
    assert engine.info.num_blocks == blocks_after(plan, available, plan.weight_bytes + activations)
    assert engine.info.num_blocks != plan.num_blocks
    assert engine.info.max_model_len == min(50_000, engine.info.num_blocks * 16)
    assert f"measured ({format_bytes(plan.activation_bytes)} computed)" in caplog.text
    assert engine.runner.max_captured_tokens == 512


def test_the_plan_has_what_cache_eviction_takes_beside_what_was_measured(
    gpu: CountedMemory, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = dataclasses.replace(SCHEDULER, max_num_seqs=4000, use_cache_eviction=True)
    config = config_of(checkpoint, max_model_len=50_000, scheduler=scheduler)
    plan = computed(config)
    monkeypatch.setattr(profile_run, "profile_run", lambda *_: 0)
    told = ToldMemory(SIZE, plan.weight_bytes + 10**7 + 16 * plan.kv_bytes_per_block)
    monkeypatch.setattr(devices, "CudaMemory", lambda: told)
    keeping = dataclasses.replace(scheduler, use_cache_eviction=False)
    eviction = (
        plan.activation_bytes - computed(dataclasses.replace(config, scheduler=keeping)).activation_bytes
    )
    left = SIZE * 9 // 10 - plan.weight_bytes - 10**7 - eviction
    assert started(config).info.num_blocks == left // (plan.kv_bytes_per_block + plan.score_bytes_per_block)


def test_states_are_no_activations(
    gpu: CountedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("lfm2", tmp_path, max_position_embeddings=50_000)
    many = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=64)
    config = config_of(checkpoint, max_model_len=50_000, scheduler=many)
    plan = computed(config)
    in_use = many.max_num_seqs * plan.states.layout.bytes_per_state
    assert plan.state_bytes == 5 * in_use, "checkpoints are needed by no step"
    profiled: list[int] = []
    monkeypatch.setattr(
        profile_run, "profile_run", lambda runner, *_: profiled.append(runner.states.states.nbytes) or 0
    )
    peak = plan.weight_bytes + 10**7 + 16 * plan.kv_bytes_per_block + in_use
    monkeypatch.setattr(devices, "CudaMemory", lambda: ToldMemory(10**8, peak))
    taken = plan.weight_bytes + 10**7 + plan.state_bytes
    assert started(config).info.num_blocks == blocks_after(plan, 10**8, taken)
    assert profiled == [in_use]


def test_made_up_prompts_of_an_encoder_are_whole(
    gpu: CountedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_encoder(make_encoder("bert", num_hidden_layers=1), tmp_path)
    lengths: list[list[int]] = []
    forward = Decoder.forward

    def watch(model: Decoder, ids: Any, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        assert not batch.num_cached_tokens.any()
        lengths.append(batch.num_tokens.tolist())
        return forward(model, ids, kv, batch, **options)

    monkeypatch.setattr(Decoder, "forward", watch)
    started(config_of(tmp_path, max_model_len=40))
    assert lengths[-4:] == [[40, 22, 1, 1], [16], [4], [4, 1, 1, 1]]


@pytest.mark.interpreter
def test_steps_are_counted_and_leave_nothing(
    gpu: CountedMemory, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []
    taken: list[int] = []
    around: list[int] = []  # what is taken by weights, and after the run
    load, schedule = core.load_models, core.build_scheduler
    run, forward = profile_run.profile_run, Decoder.forward

    def watch_run(*args: Any) -> None:
        taken.append(gpu.num_taken)
        run(*args)
        peaks.append(gpu.peak)

    def watch(function: Any, *args: Any, **options: Any) -> Any:
        gc.collect()
        around.append(gpu.num_taken)
        result = function(*args, **options)
        gc.collect()
        around.append(gpu.num_taken)
        return result

    def hungry_forward(model: Decoder, ids: Any, *args: Any, **options: Any) -> Any:
        if len(ids) == SCHEDULER.max_num_batched_tokens:
            torch.empty(10**8, dtype=torch.uint8)
        return forward(model, ids, *args, **options)

    monkeypatch.setattr(core, "load_models", functools.partial(watch, load))
    monkeypatch.setattr(core, "build_scheduler", functools.partial(watch, schedule))
    monkeypatch.setattr(profile_run, "profile_run", watch_run)
    monkeypatch.setattr(Decoder, "forward", hungry_forward)
    config = config_of(checkpoint)
    plan = computed(config)
    engine = started(config)
    assert 10**8 < peaks[0] - taken[0] < 1.2 * 10**8
    _, after_weights, after_run, _ = around
    assert 0 < after_run - after_weights < 1_000_000  # the buffers that the model keeps from step to step
    assert engine.runner.num_requests == 0
    shown = SIZE * 9 // 10 - (peaks[0] - 16 * plan.kv_bytes_per_block)
    usable = 4 * 256 // 16
    assert engine.info.num_blocks == min(usable, shown // plan.kv_bytes_per_block)


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_tokens_are_those_of_an_engine_that_measures_nothing(
    gpu: CountedMemory, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    outputs = []
    for memory in (gpu, None):
        monkeypatch.setattr(core, "watched_memory", lambda config, memory=memory: memory)
        engine = started(config_of(checkpoint))
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, seed=0)
        engine.add(EngineCoreRequest(["a"], [0], list(range(3, 40)), params))
        found: list[int] = []
        while engine.has_requests():
            for output in engine.step()[0]:
                found += output.new_token_ids
        outputs.append(found)
    assert len(outputs[0]) == 6
    assert outputs[0] == outputs[1]


def test_a_step_that_does_not_fit_is_refused_with_the_knobs(
    gpu: CountedMemory, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any) -> None:
        gpu.taken_by_others = SIZE - gpu.num_taken
        torch.empty(10**6)

    monkeypatch.setattr(profile_run, "profile_run", run_out)
    with pytest.raises(
        ConfigError,
        match=r"max_num_batched_tokens 64 and SchedulerConfig\.max_num_seqs 4 ran out of memory: of .* "
        r"available, weights take .* lower either",
    ):
        started(config_of(checkpoint))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("part", ["load_models", "build_runner"])
@pytest.mark.parametrize(
    "kind", [torch.OutOfMemoryError, RuntimeError]
)  # torch's, and Triton's or CUDA's own
def test_memory_that_others_take_meanwhile_is_told_with_the_knobs(
    gpu: CountedMemory, checkpoint: Path, part: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        gpu.taken_by_others = 2 * 10**9
        raise kind("CUDA out of memory. Process 7 has 2.00 GB in use.")

    monkeypatch.setattr(core, part, run_out)
    monkeypatch.setattr(profile_run, "profile_run", lambda *_: 0)
    with pytest.raises(
        ConfigError,
        match=r"; 1 GB can be taken .* lower EngineConfig\.hbm_utilization\. .* Process 7 has 2\.00 GB",
    ):
        started(config_of(checkpoint))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("num_kv_blocks", "message"),
    [
        (0, r"no KV block of .* and activations 2\.9 GB; raise EngineConfig\.hbm_utilization, or lower"),
        (
            600,
            r"num_kv_blocks asks for .*, but the weights and activations leave .* largest that fits",
        ),
    ],
)
def test_what_the_measured_steps_leave_no_room_for_is_refused(
    gpu: CountedMemory, checkpoint: Path, num_kv_blocks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=num_kv_blocks)
    config = config_of(checkpoint, scheduler=scheduler)
    plan = computed(config)
    monkeypatch.setattr(profile_run, "profile_run", lambda *_: None)
    peak = plan.weight_bytes + 16 * plan.kv_bytes_per_block + 29 * 10**8
    told = ToldMemory(peak + 10**6, peak)
    monkeypatch.setattr(devices, "CudaMemory", lambda: told)
    with pytest.raises(ConfigError, match=message):
        started(config)


def test_what_torch_takes_of_a_gpu_s_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch keeps of tensors that are gone is free; what there was before does not count."""
    state = {"reserved": 70, "peak": 0, "cached": 20, "free": 100}

    def empty_cache() -> None:
        state["reserved"] -= state["cached"]
        state["free"] += state["cached"]
        state["cached"] = 0

    def take(num_bytes: int, cached: int) -> None:
        state["reserved"] += num_bytes
        state["free"] -= num_bytes
        state["cached"] += cached
        state["peak"] = max(state["peak"], state["reserved"])

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: state.update(peak=state["reserved"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (state["free"], 1000))
    memory = devices.CudaMemory()
    assert (memory.num_taken, memory.num_available) == (0, 120)
    take(60, cached=25)
    memory.begin_peak()
    take(9, cached=9)
    assert (memory.peak, memory.num_taken, memory.num_available) == (44, 35, 120)
    state["free"] -= 30  # somebody else's
    assert (memory.num_taken, memory.num_available) == (35, 90)
