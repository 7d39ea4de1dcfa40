"""The kernels of experts are what Triton's compiler takes, and are not compiled again for other steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiled import output_of

pytest.importorskip(
    "triton.backends.nvidia", reason="this machine's Triton has no compiler for NVIDIA's GPUs"
)
SHARED_BYTES = 227 << 10  # that a program may have on compute capability 9.0


def test_experts_compile_for_hopper_once(tmp_path: Path) -> None:
    report = json.loads(output_of("compile_experts_for_hopper.py", tmp_path))
    # Choosing, sorting, both products, adding up; for tiles of more rows products again, and sorting twice.
    assert report["few"] == 5
    assert report["many"] == 9
    assert report["quantized"] == [11, 13, 15]
    assert report["biased"] == [17, 19]
    assert report["shared"] <= SHARED_BYTES
    assert report["tensor_cores"] == [True] * 14
