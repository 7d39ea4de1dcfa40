"""The primitives that the model calls, bound to the best version for this machine.

Today that is the reference for all of them. A native or Triton version replaces a name here, with the same
signature, and is tested against `quire.kernels.reference`.
"""

from __future__ import annotations

from quire.kernels.reference import (
    apply_rotary,
    gated_activation,
    linear,
    paged_attention,
    rms_norm,
    write_kv,
)

__all__ = ["apply_rotary", "gated_activation", "linear", "paged_attention", "rms_norm", "write_kv"]
