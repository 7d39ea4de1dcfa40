"""Compute primitives, one signature each. Import them from `quire.kernels.dispatch`, which picks the version.

This package stays light so that importing it costs nothing; its modules import torch, except for `bounds`.
"""

import functools
import importlib.util


@functools.cache  # a memory plan asks for every length that it tries
def has_native_kernels() -> bool:
    """Return whether Quire was installed with its native kernels."""
    return importlib.util.find_spec("quire.kernels.cpu._native") is not None
