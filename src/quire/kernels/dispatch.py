"""The kernels of this machine, chosen once: native ones where they are built, else the reference."""

from __future__ import annotations

import functools
import importlib.util
import logging

from quire.errors import ConfigError
from quire.kernels import has_native_kernels
from quire.kernels.devices.device import cuda_obstacle
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


@functools.cache
def kernel_set(name: str = "auto") -> KernelSet:
    """Return the kernels called `name`: auto, native, triton or reference.

    Raises:
        ConfigError: native ones were asked for, and Quire was installed without them; or those in Triton,
            which is not installed, or has no GPU here.
    """
    if name == "reference":
        return ReferenceKernels()
    if name == "triton":
        return _triton_kernels()
    if has_native_kernels():
        from quire.kernels.cpu.kernel_set import NativeKernels

        return NativeKernels()
    if name == "native":
        raise ConfigError(
            "EngineConfig.kernels is 'native', but Quire was installed without its native kernels; install a "
            "C++ compiler and then Quire again, or set it to 'auto'"
        )
    logger.warning(
        "Quire was installed without its native kernels, so that all that is computed on the CPU runs on the "
        "much slower reference ones; install a C++ compiler and then Quire again"
    )
    return ReferenceKernels()


def gpu_obstacle() -> str:
    """Return why no kernels compute on a GPU here, what is cheap to ask first; empty: those in Triton do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install quire[gpu]"
    obstacle = cuda_obstacle()
    if obstacle:
        return obstacle
    from quire.kernels.triton.device import is_interpreted, launch_obstacle

    if is_interpreted:
        return "TRITON_INTERPRET is set, so that Triton computes on the CPU; unset it"
    return launch_obstacle()


def _triton_kernels() -> KernelSet:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "EngineConfig.kernels is 'triton', but Triton is not installed; install quire[gpu], or set it to "
            "'auto'"
        )
    from quire.kernels.triton.device import is_interpreted
    from quire.kernels.triton.kernel_set import TritonKernels

    obstacle = "" if is_interpreted else gpu_obstacle()
    if obstacle:
        raise ConfigError(
            f"EngineConfig.kernels is 'triton', but {obstacle}; set it to 'auto', or set TRITON_INTERPRET=1 "
            "in the environment: Triton's interpreter needs no GPU, and is very slow"
        )
    return TritonKernels()
