"""On which device an engine runs, what it refuses there, and what it plans with: no GPU is needed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from insides import copier_of
from late_device import LateDevice
from quire.config import EngineConfig, KVTierConfig, KVTransferConfig, SchedulerConfig
from quire.engine import devices as engine_devices
from quire.engine.building.assembly import build_connector, commits_of_groups
from quire.engine.building.kv_identity import kv_fingerprint
from quire.engine.devices import available_bytes, device_name, on_cuda, on_one_device
from quire.engine.memory.byte_sizes import GB
from quire.engine.memory.cache_warming import CacheWarmer
from quire.engine.memory.plan import MemoryPlan, activation_bytes, plan_memory, plan_memory_again
from quire.errors import ConfigError
from quire.kernels import bounds, dispatch
from quire.kernels.devices import cuda_copies
from quire.kernels.devices import device as devices
from quire.kernels.devices.device import HOST
from quire.kernels.reference import ReferenceKernels
from quire.kernels.sampling.seen_tokens import SeenTokens
from quire.kernels.triton.attention import items as attention_items
from quire.kernels.triton.attention import plan as attention_plan
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.tiers import block_copier
from quire.kv.tiers.block_copier import BlockCopier, HostCopier, host_copier
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.device_copier import DeviceCopier
from quire.kv.tiers.tier import MemoryTier
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model
from quire.models.config import ModelConfig
from quire.models.weights import weight_bytes, weight_specs


class GpuKernels(ReferenceKernels):
    name = "triton"
    device = torch.device("cuda")


class OwnTier(TierConnector):
    def __init__(self, block_size: int, **options: Any) -> None:
        super().__init__(block_size, lambda num_bytes: MemoryTier(1 << 20, num_bytes, min_uses=1), **options)


class CopyingTier(OwnTier):
    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, copier_of=host_copier)


OWN_TIER = "test_devices.OwnTier"
MEMORY, DISK = KVTierConfig(kv_tier="memory"), KVTierConfig(kv_tier="disk")


def capabilities(monkeypatch: pytest.MonkeyPatch, *of_gpus: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_gpus.__getitem__)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs of 80 GB, half of which is taken."""
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "")
    monkeypatch.setattr(devices, "free_cuda_memory", lambda: 40 * GB)
    monkeypatch.setattr(devices, "cuda_memory", lambda: 80 * GB)
    monkeypatch.setattr(devices, "cuda_name", lambda: "A GPU")
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    capabilities(monkeypatch, (9, 0), (9, 0))
    monkeypatch.setattr(devices, "has_nccl", lambda: True)
    monkeypatch.setattr(
        dispatch, "kernel_set", lambda name="auto": GpuKernels() if name == "triton" else ReferenceKernels()
    )


@pytest.fixture(scope="module")
def mini() -> ModelConfig:
    return read_model_config(resolve_model("mini"))


def chosen(**fields: Any) -> tuple[str, str]:
    config = on_one_device(EngineConfig(**fields))
    return config.device, config.kernels


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("cuda", "triton")),
        ({"device": "cuda"}, ("cuda", "triton")),
        ({"kernels": "triton"}, ("cuda", "triton")),
        ({"device": "cpu"}, ("cpu", "auto")),
        ({"kernels": "native"}, ("cpu", "native")),
        ({"kernels": "reference"}, ("cpu", "reference")),
        ({"device": "cpu", "kernels": "native"}, ("cpu", "native")),
    ],
)
def test_the_device_and_its_kernels_where_there_is_a_gpu(
    fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert chosen(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("cpu", "auto")),
        ({"device": "cpu"}, ("cpu", "auto")),
        ({"kernels": "triton"}, ("cpu", "triton")),  # in the interpreter
        ({"device": "cpu", "kernels": "triton"}, ("cpu", "triton")),
    ],
)
def test_the_device_and_its_kernels_where_there_is_none(
    fields: dict[str, Any], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "torch sees no GPU")
    assert chosen(**fields) == expected


@pytest.mark.usefixtures("gpu")
def test_how_many_tokens_a_step_has_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(wanted: int = 0, device: str = "auto") -> int:
        scheduler = SchedulerConfig(max_num_batched_tokens=wanted)
        return on_one_device(
            EngineConfig(device=device, scheduler=scheduler)
        ).scheduler.max_num_batched_tokens

    assert tokens() == 8192
    assert tokens(device="cpu") == 512
    assert tokens(700) == tokens(700, "cpu") == 700
    monkeypatch.setattr(devices, "cuda_memory", lambda: 24 * GB)
    assert tokens() == 2048


@pytest.mark.usefixtures("gpu")
def test_what_a_gpu_would_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"device is 'cuda', but EngineConfig.kernels is 'native', and .*'auto'"
    ):
        chosen(device="cuda", kernels="native")
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "torch sees no GPU")
    with pytest.raises(ConfigError, match=r"^EngineConfig\.device is 'cuda', but torch sees no GPU$"):
        chosen(device="cuda")
    with pytest.raises(ConfigError, match=r"EngineConfig\.kernels is 'triton', .* but torch sees no GPU"):
        chosen(kernels="triton")
    with pytest.raises(
        ConfigError, match=r"EngineConfig\.kernels is 'triton', .*device is 'cpu'; set kernels"
    ):
        chosen(device="cpu", kernels="triton")


def test_float8_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "torch sees no GPU")
    for fields in ({}, {"kernels": "native"}, {"kernels": "reference"}, {"device": "cpu"}):
        with pytest.raises(
            ConfigError, match=r"quantization is 'fp8', .*kernels for GPUs .*, but .*; set .* to 'int8'"
        ):
            chosen(quantization="fp8", **fields)
        with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8', .*; set kv_cache_dtype to 'int8'"):
            chosen(kv_cache_dtype="fp8", **fields)
    assert chosen(quantization="fp8", kernels="triton") == ("cpu", "triton")  # in the interpreter
    assert chosen(kv_cache_dtype="fp8", kernels="triton") == ("cpu", "triton")


@pytest.mark.usefixtures("gpu")
def test_kv_in_4_bits_is_for_cpus() -> None:
    assert chosen(kv_cache_dtype="int4", device="cpu")[0] == "cpu"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int4', which only the kernels for CPUs"):
        chosen(kv_cache_dtype="int4")


def test_kv_in_4_bits_is_not_for_triton() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int4', which only the kernels for CPUs"):
        chosen(kv_cache_dtype="int4", kernels="triton")  # in the interpreter


@pytest.mark.usefixtures("gpu")
def test_float8_is_for_gpus_that_have_it(mini: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities(monkeypatch, (8, 6))
    for name in ("kv_cache_dtype", "quantization"):
        with pytest.raises(ConfigError, match=rf"{name} is 'fp8', .* capability 8\.9, .* has 8\.6; .*'int8'"):
            chosen(**{name: "fp8"})
    capabilities(monkeypatch, (9, 0), (8, 6))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9, but this GPU has 8\.6"):
        chosen(quantization="fp8", tensor_parallel_size=2)
    assert chosen(quantization="fp8") == ("cuda", "triton")
    config = on_one_device(EngineConfig(kv_cache_dtype="fp8", dtype="bfloat16"))
    plans = [plan_memory(each, mini) for each in (config, dataclasses.replace(config, kv_cache_dtype="auto"))]
    assert [plan.kv_dtype for plan in plans] == ["float8_e4m3fn", "bfloat16"]
    narrow, wide = (plan.kv_caches[0].bytes_per_block for plan in plans)
    assert wide == 2 * narrow


@pytest.mark.usefixtures("gpu")
def test_weights_in_float8_are_planned_where_they_are_held(mini: ModelConfig) -> None:
    assert chosen(quantization="fp8") == ("cuda", "triton")
    fp8, bf16 = (
        plan_memory(on_one_device(EngineConfig(quantization=quantization)), mini)
        for quantization in ("fp8", "none")
    )
    assert fp8.weight_type == "fp8"
    matrices = [source.shape for spec in weight_specs(mini) if spec.is_quantized for source in spec.sources]
    assert bf16.weight_bytes - fp8.weight_bytes == sum(rows * (inputs - 4) for rows, inputs in matrices)


def test_a_gpu_is_planned_for_where_there_is_none(mini: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "torch sees no GPU")
    config = on_cuda(EngineConfig(device="cuda"), gpu_bytes=80 * GB)
    assert (config.device, config.kernels) == ("cuda", "triton")
    in_float8 = dataclasses.replace(mini, stored_quantization="fp8")
    assert plan_memory(config, in_float8, available_bytes=80 * GB).weight_type == "fp8"
    with pytest.raises(ConfigError, match=r"Config\.kernels is "):
        on_cuda(EngineConfig(device="cuda", kernels="native"), gpu_bytes=80 * GB)


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 30]  # in torch's own cache, and beside it
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + free.pop()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[-1], 80))
    assert devices.free_cuda_memory() == 40


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_that_is_passed_over_is_named(
    has_driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = tmp_path / "version"
    if has_driver:
        driver.write_text("NVRM version")
    monkeypatch.setattr(engine_devices, "NVIDIA_DRIVERS", (tmp_path / "other", driver))
    monkeypatch.setattr(dispatch, "gpu_obstacle", lambda: "torch sees no GPU")
    assert chosen() == ("cpu", "auto")
    assert chosen(device="cpu") == ("cpu", "auto")
    assert caplog.text.count("runs on the CPU: torch sees no GPU") == has_driver


def test_what_torch_lacks_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build for CPUs" in devices.cuda_obstacle()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in devices.cuda_obstacle()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capabilities(monkeypatch, (7, 5))
    assert "need a GPU of compute capability 8.0 or more, and this one's is 7.5" in devices.cuda_obstacle()
    capabilities(monkeypatch, (8, 0))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    assert not devices.cuda_obstacle()


@pytest.mark.parametrize(
    "reason", ["out of memory", "no kernel image is available for execution on the device"]
)
def test_a_gpu_that_does_not_compute_is_told_as_torch_tells_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"CUDA error: {reason}\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capabilities(monkeypatch, (8, 0))
    monkeypatch.setattr(torch, "ones", fail)
    assert f"cannot compute on the GPU (CUDA error: {reason}); end what else" in devices.cuda_obstacle()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_cache_eviction_leaves_the_choice_of_the_device(device: str) -> None:
    evicting = SchedulerConfig(use_cache_eviction=True)
    assert chosen(device=device, scheduler=evicting) == ("cuda", "triton")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "prefill"}, "EngineConfig.role is 'prefill'"),
        (
            {"kv_transfer": KVTransferConfig(kv_peers="10.0.0.1:9000")},
            "KVTransferConfig.kv_peers is '10.0.0.1:9000'",
        ),
        (
            {"kv_transfer": KVTransferConfig(kv_transfer_port=9000)},
            "KVTransferConfig.kv_transfer_port is 9000",
        ),
    ],
)
def test_the_kv_of_one_gpu_is_shared_and_not_that_of_several(fields: dict[str, Any], named: str) -> None:
    assert chosen(**fields) == ("cuda", "triton")
    with pytest.raises(ConfigError, match=rf"parallel_size is 2 and {re.escape(named)}, .*'cpu'$"):
        chosen(tensor_parallel_size=2, **fields)
    assert chosen(device="cpu", tensor_parallel_size=2, **fields) == ("cpu", "auto")


@pytest.mark.usefixtures("gpu")
def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_one_device(EngineConfig(tensor_parallel_size=2))
    assert (config.device, device_name(config)) == ("cuda", "cuda: 2 x A GPU")
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4, .* CUDA shows 2; lower .*VISIBLE"):
            chosen(device=device, tensor_parallel_size=4)
    assert chosen(device="cpu", tensor_parallel_size=4) == ("cpu", "auto")
    capabilities(monkeypatch, (9, 0), (7, 5))
    with pytest.raises(
        ConfigError, match=r"one of the first 2 GPUs has compute capability 7\.5, .* need 8\.0"
    ):
        chosen(tensor_parallel_size=2)
    capabilities(monkeypatch, (9, 0), (9, 0))
    monkeypatch.setattr(devices, "has_nccl", lambda: False)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, but .* lacks NCCL, .*; set it to 1"):
        chosen(tensor_parallel_size=2)
    assert chosen() == ("cuda", "triton")


@pytest.mark.usefixtures("gpu")
def test_each_rank_s_memory_is_that_of_its_gpu(mini: ModelConfig) -> None:
    one, two = (plan_memory(on_one_device(EngineConfig(tensor_parallel_size=size)), mini) for size in (1, 2))
    assert one.available_bytes == two.available_bytes == 40 * GB
    assert one.weight_bytes / 2 <= two.weight_bytes < one.weight_bytes
    assert two.kv_bytes_per_block == one.kv_bytes_per_block / 2
    scheduler, layers = SchedulerConfig(), {"dtype": "bfloat16", "max_model_len": 512, "num_ranks": 2}
    on_gpu, on_host = (activation_bytes(scheduler, mini, **layers, on_gpu=on_gpu) for on_gpu in (True, False))
    alone = activation_bytes(scheduler, mini, "bfloat16", max_model_len=512, on_gpu=True)
    assert on_gpu > alone + bounds.NCCL_BYTES
    assert on_host < bounds.NCCL_BYTES


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "tier",
    [{"kv_tiering": MEMORY}, {"kv_tiering": DISK}, {"kv_connector": OWN_TIER}],
    ids=["memory", "disk", "own"],
)
def test_blocks_on_their_way_to_a_tier_are_planned(tier: dict[str, Any], mini: ModelConfig) -> None:
    without, beside = (
        plan_memory(on_one_device(EngineConfig(**fields)), mini, available_bytes=3 * GB)
        for fields in ({"kv_connector": "memory_connector.MemoryConnector"}, tier)
    )
    block = beside.kv_bytes_per_block
    assert (without.staged_bytes, beside.staged_bytes) == (0, block_copier.MAX_STAGED_BYTES // block * block)
    assert abs(without.kv_bytes - beside.kv_bytes - beside.staged_bytes) <= block
    assert abs(without.total_bytes - beside.total_bytes) <= block
    on_host = on_one_device(EngineConfig(device="cpu", **tier))
    assert plan_memory(on_host, mini).staged_bytes == 0


def built_copier(config: EngineConfig, plan: MemoryPlan) -> BlockCopier:
    """Return what copies the blocks of an engine with a tier."""
    path = resolve_model("mini")
    connector = build_connector(config, path, read_model_config(path), plan)
    connector.register_kv_caches([PagedAttentionCache.init_cache(None, plan.kv_caches[0])])
    return copier_of(connector)


@pytest.mark.usefixtures("gpu")
def test_a_tier_of_one_s_own_copies_by_the_device_unless_it_knows_better(
    mini: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copies, "CudaCopies", LateDevice)
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 1 << 20)
    scheduler = SchedulerConfig(num_kv_blocks=32)
    expected = {
        ("auto", OWN_TIER): DeviceCopier,
        ("cpu", OWN_TIER): HostCopier,
        ("auto", "test_devices.CopyingTier"): HostCopier,
    }
    for (device, name), copier in expected.items():
        asked = EngineConfig(device=device, kv_connector=name, max_model_len=512, scheduler=scheduler)
        config = on_one_device(asked)
        assert isinstance(built_copier(config, plan_memory(config, mini)), copier)


@pytest.mark.usefixtures("gpu")
def test_a_connector_that_does_not_exist_is_noticed_before_anything_is_planned(mini: ModelConfig) -> None:
    config = on_one_device(EngineConfig(kv_connector="test_devices.CopyingTeir"))
    with pytest.raises(ConfigError, match=r"kv_connector is .*; did you mean 'CopyingTier'"):
        plan_memory(config, mini)


@pytest.mark.usefixtures("gpu")
def test_a_tier_of_a_gpu_copies_there_and_finds_nothing_of_another(
    mini: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copies, "CudaCopies", LateDevice)
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 1 << 20)
    path = resolve_model("mini")
    scheduler = SchedulerConfig(num_kv_blocks=32)
    config = on_one_device(EngineConfig(kv_tiering=MEMORY, max_model_len=512, scheduler=scheduler))
    plan = plan_memory(config, mini)
    assert isinstance(built_copier(config, plan), DeviceCopier)
    fingerprints = set()
    for name in ("A GPU", "Another"):
        monkeypatch.setattr(devices, "cuda_name", lambda name=name: name)
        fingerprints.add(kv_fingerprint(config, path, mini, plan))
    on_host = dataclasses.replace(config, device="cpu")
    assert len(fingerprints | {kv_fingerprint(on_host, path, mini, plan)}) == 3


@pytest.mark.usefixtures("gpu")
def test_a_gpu_s_memory_is_planned_and_all_of_the_cache_is_there_from_the_start(mini: ModelConfig) -> None:
    config = on_one_device(EngineConfig(max_model_len=512))
    assert (available_bytes(config), device_name(config)) == (40 * GB, "cuda: A GPU")
    plan = plan_memory(config, mini)
    assert plan.available_bytes == 40 * GB
    unbounded = SchedulerConfig(max_num_seqs=10**6)
    for share in (0.2, 0.9):
        asked = EngineConfig(device="cuda", hbm_utilization=share, scheduler=unbounded)
        largest = plan_memory(asked, mini)
        assert 0 <= 40 * GB * share - largest.total_bytes < largest.kv_bytes_per_block
    assert plan_memory_again(config, mini, 77).num_blocks == 77
    assert commits_of_groups(config, plan) == [None]
    assert config.scheduler.overlap_steps
    on_host = on_one_device(EngineConfig(device="cpu", max_model_len=512))
    assert device_name(on_host) == "cpu"
    assert None not in commits_of_groups(on_host, plan)


def test_weights_of_a_gpu_are_not_in_mapped_files(mini: ModelConfig) -> None:
    tied = dataclasses.replace(mini, tie_word_embeddings=True, embedding_dtype="bfloat16")
    vectors = mini.vocab_size * mini.hidden_size * 2
    for config in (tied, dataclasses.replace(tied, embedding_dtype="")):  # mapped, and decoded row by row
        held = [weight_bytes(config, "bfloat16", "none", 128, on_gpu=on_gpu) for on_gpu in (False, True)]
        assert held[1] - held[0] == vectors
    int4 = weight_bytes(mini, "bfloat16", "int4", 32, is_native=False, on_gpu=True)
    assert int4 < weight_bytes(mini, "bfloat16", "int4", 32, is_native=False)


def test_attention_s_parts_are_planned_as_its_kernels_bound_them(mini: ModelConfig) -> None:
    assert bounds.GPU_PART_BYTES == attention_items.MAX_PART_BYTES
    assert len(attention_plan.ROW_CLASSES) == bounds.GPU_TILE_HEIGHTS
    planned = activation_bytes(SchedulerConfig(), mini, "bfloat16", max_model_len=512, on_gpu=True)
    assert planned >= bounds.GPU_TILE_HEIGHTS * bounds.GPU_PART_BYTES


def test_counts_of_tokens_for_penalties_are_planned(mini: ModelConfig) -> None:
    lengths = bounds.SHORT_COUNTS_END - 1, bounds.SHORT_COUNTS_END
    held = [SeenTokens(9, mini.vocab_size, length, HOST).counts.nbytes for length in lengths]
    planned = [
        activation_bytes(SchedulerConfig(max_num_seqs=9), mini, "bfloat16", max_model_len=length, on_gpu=True)
        for length in lengths
    ]
    angles = sum(rope.rotary_dim for rope in mini.ropes) * 4  # of one more position
    assert held == [9 * mini.vocab_size * size for size in (2, 4)]
    assert planned[1] - planned[0] == held[1] - held[0] + angles


def test_the_memory_of_a_gpu_is_not_warmed() -> None:
    asked: list[int] = []
    warmer = CacheWarmer(torch.empty(4, 64, device="meta"), lambda: np.array(asked.append(1)))
    warmer.resume()
    warmer.close()
    assert not asked
