"""The kernels of this machine, chosen once: native ones where they are built, else the reference."""

from __future__ import annotations

import functools
import logging

from quire.errors import ConfigError
from quire.kernels import has_native_kernels
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


@functools.cache
def kernel_set(name: str = "auto") -> KernelSet:
    """Return the kernels called `name`: auto, native or reference.

    Raises:
        ConfigError: native ones were asked for, and Quire was installed without them.
    """
    if name == "reference":
        return ReferenceKernels()
    if has_native_kernels():
        from quire.kernels.cpu.kernel_set import NativeKernels

        return NativeKernels()
    if name == "native":
        raise ConfigError(
            "EngineConfig.kernels is 'native', but Quire was installed without its native kernels; install a "
            "C++ compiler and then Quire again, or set it to 'auto'"
        )
    logger.warning(
        "Quire was installed without its native kernels and runs on the much slower reference ones; install "
        "a C++ compiler and then Quire again"
    )
    return ReferenceKernels()
