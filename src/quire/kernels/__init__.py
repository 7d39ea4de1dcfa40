"""Compute primitives, one signature each. Import them from `quire.kernels.dispatch`, which picks the version.

This package stays light so that importing it costs nothing; its modules import torch, except for `bounds`.
"""

import functools
import importlib.util


@functools.cache  # a memory plan asks for every length that it tries
def has_native_kernels() -> bool:
    """Return whether Quire was installed with its native kernels."""
    return importlib.util.find_spec("quire.kernels.cpu._native") is not None


def native_output_bits(int4_activations: str = "int8") -> int:
    """Return the bits in which native kernels hold the output layer of a model in int4.

    Six are less to read, but matrix units multiply only eight, and with six, activations in bfloat16 take
    longer.
    """
    from quire.kernels.cpu import _native

    return 6 if int4_activations == "int8" and _native.instruction_set() != "amx" else 8
