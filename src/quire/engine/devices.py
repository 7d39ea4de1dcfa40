"""The device that an engine computes on: chosen at start-up, with the kernels for it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.kv.cache.memory_limits import available_memory

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.kernels.devices.device import CudaMemory

logger = logging.getLogger(__name__)

NVIDIA_DRIVERS = Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1")
"""One of these is there if the system, or Windows below it, has the driver of NVIDIA's GPUs."""

_FLOAT8_CAPABILITY = 8, 9  # from which on GPUs convert float8_e4m3fn


def on_one_device(config: EngineConfig) -> EngineConfig:
    """Return `config` with the device that `auto` stands for here, and kernels that compute on it.

    On a GPU, steps overlap: it is given the next one while it computes.

    Raises:
        ConfigError: there is no such device here, the kernels compute elsewhere, or the engine is to do what
            it cannot do on this device.
    """
    wanted = config.device
    obstacle = "EngineConfig.device is 'cpu'" if wanted == "cpu" else _cuda_obstacle(config)
    if not obstacle:
        from quire.kernels.devices.device import cuda_memory

        _check_gpus(config)
        _refuse_int4_kv(config)
        _refuse_float8_on_older_gpus(config)
        return on_cuda(config, gpu_bytes=cuda_memory())
    if wanted == "cuda":
        raise ConfigError(f"EngineConfig.device is 'cuda', but {obstacle}")
    if wanted == "auto" and any(map(Path.exists, NVIDIA_DRIVERS)):
        logger.warning("there is an NVIDIA GPU, but the model runs on the CPU: %s", obstacle)
    if config.kernels == "triton":
        _refuse_kernels_elsewhere(obstacle)
        _refuse_int4_kv(config)
    else:
        _refuse_float8(config, obstacle)
    return on_cpu(config)


def on_cpu(config: EngineConfig) -> EngineConfig:
    """Return `config` on the CPU."""
    return dataclasses.replace(config, device="cpu", scheduler=config.scheduler.with_step_tokens())


def on_cuda(config: EngineConfig, *, gpu_bytes: int) -> EngineConfig:
    """Return `config` on a GPU with `gpu_bytes` of memory, whether or not there is one here.

    Raises:
        ConfigError: the kernels compute elsewhere, or the engine is to do what it cannot do on a GPU.
    """
    obstacle = _kernels_obstacle(config)
    if obstacle:
        raise ConfigError(f"EngineConfig.device is 'cuda', but {obstacle}")
    _refuse_beside_cuda(config)
    scheduler = dataclasses.replace(config.scheduler.with_step_tokens(gpu_bytes), overlap_steps=True)
    return dataclasses.replace(config, device="cuda", kernels="triton", scheduler=scheduler)


def available_bytes(config: EngineConfig) -> int:
    """Return the memory that an engine on `config.device` can take; of several GPUs, on the first one."""
    if config.device != "cuda":
        return available_memory()
    from quire.kernels.devices.device import free_cuda_memory

    return free_cuda_memory()


def watched_memory(config: EngineConfig) -> CudaMemory | None:
    """Start to watch the memory of the engine's GPU; None: it has none."""
    if config.device != "cuda":
        return None
    from quire.kernels.devices.device import CudaMemory

    return CudaMemory()


def device_name(config: EngineConfig) -> str:
    """Return the name of an engine's device: cpu, or cuda with the GPU's name."""
    if config.device != "cuda":
        return config.device
    from quire.kernels.devices.device import cuda_name

    size = config.tensor_parallel_size
    return f"cuda: {cuda_name()}" if size == 1 else f"cuda: {size} x {cuda_name()}"


def _kernels_obstacle(config: EngineConfig) -> str:
    """Return why the kernels that are asked for do not compute on a GPU; empty: they do."""
    if config.kernels in ("auto", "triton"):
        return ""
    return f"EngineConfig.kernels is {config.kernels!r}, and these compute on the CPU; set it to 'auto'"


def _cuda_obstacle(config: EngineConfig) -> str:
    """Return why an engine cannot compute on a GPU; empty: it can."""
    from quire.kernels.dispatch import gpu_obstacle

    return _kernels_obstacle(config) or gpu_obstacle()


def _check_gpus(config: EngineConfig) -> None:
    """Raise `ConfigError` if there is not a GPU for each rank, or GPUs cannot exchange tensors."""
    from quire.kernels.devices.device import MIN_CAPABILITY, cuda_capability, dotted, has_nccl, num_gpus

    size = config.tensor_parallel_size
    if size == 1:
        return
    if num_gpus() < size:
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, and each rank needs a GPU of its own, but CUDA "
            f"shows {num_gpus()}; lower it to that, show more of them (CUDA_VISIBLE_DEVICES), or set "
            "EngineConfig.device to 'cpu'"
        )
    if cuda_capability(size) < MIN_CAPABILITY:
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, but one of the first {size} GPUs has compute "
            f"capability {dotted(cuda_capability(size))}, and the kernels need {dotted(MIN_CAPABILITY)}; "
            "show others (CUDA_VISIBLE_DEVICES), or lower it"
        )
    if not has_nccl():
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, but this build of torch lacks NCCL, which "
            "GPUs need to exchange tensors; set it to 1, install torch's build for CUDA on Linux, or set "
            "EngineConfig.device to 'cpu'"
        )


def _refuse_kernels_elsewhere(obstacle: str) -> None:
    """Raise `ConfigError` if the kernels in Triton compute on a GPU, and the engine does not."""
    from quire.kernels.devices.device import HOST
    from quire.kernels.dispatch import kernel_set

    if kernel_set("triton").device != HOST:
        raise ConfigError(
            f"EngineConfig.kernels is 'triton', which needs a GPU, but {obstacle}; set kernels to 'auto'"
        )


def _refuse_int4_kv(config: EngineConfig) -> None:
    """Raise `ConfigError` for a type of KV that the kernels in Triton do not support."""
    if config.kv_cache_dtype == "int4":
        raise ConfigError(
            "EngineConfig.kv_cache_dtype is 'int4', which only the kernels for CPUs support; set it to "
            "'int8', or device to 'cpu'"
        )


def _refuse_float8(config: EngineConfig, obstacle: str) -> None:
    """Raise `ConfigError` for types that only GPU kernels support."""
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8":
            raise ConfigError(
                f"EngineConfig.{name} is 'fp8', which only the kernels for GPUs support, but "
                f"{obstacle}; set {name} to 'int8'"
            )


def _refuse_float8_on_older_gpus(config: EngineConfig) -> None:
    """Raise `ConfigError` if weights or the KV cache are to be float8 on GPUs without float8."""
    from quire.kernels.devices.device import cuda_capability, dotted

    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) != "fp8":
            continue
        capability = cuda_capability(config.tensor_parallel_size)
        if capability < _FLOAT8_CAPABILITY:
            raise ConfigError(
                f"EngineConfig.{name} is 'fp8', which needs compute capability "
                f"{dotted(_FLOAT8_CAPABILITY)}, but this GPU has {dotted(capability)}; set it to 'int8'"
            )


def _refuse_beside_cuda(config: EngineConfig) -> None:
    """Raise `ConfigError` for features that are not supported on a GPU yet."""
    if config.shares_kv and config.tensor_parallel_size > 1:
        [(shares_by, value)] = config.moves_kv_by.items()
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {config.tensor_parallel_size} and "
            f"{shares_by} is {value!r}, but engines can share the KV of one GPU only; set one of them to its "
            "default, or EngineConfig.device to 'cpu'"
        )
