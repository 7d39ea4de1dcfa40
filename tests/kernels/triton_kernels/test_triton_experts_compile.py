"""The kernels of experts are what Triton's compiler takes, and are not compiled again for other steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import subprocesses

pytest.importorskip(
    "triton.backends.nvidia", reason="this machine's Triton has no compiler for NVIDIA's GPUs"
)
SCRIPT = Path(__file__).with_name("compile_experts_for_hopper.py")
SHARED_BYTES = 227 << 10  # that a program may have on compute capability 9.0


def test_experts_compile_for_hopper_once(tmp_path: Path) -> None:
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    done = subprocesses.run([sys.executable, str(SCRIPT)], env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Choosing, sorting, both products, adding up; for tiles of more rows products again, and sorting twice.
    assert report["few"] == 5
    assert report["many"] == 9
    assert report["quantized"] == [11, 13, 15]
    assert report["shared"] <= SHARED_BYTES
    assert report["tensor_cores"] == [True] * 10
