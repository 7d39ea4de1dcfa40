"""What the interpreter does not show: whether the kernels are what Triton's compiler takes, and how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton.backends.nvidia", reason="this machine's Triton has no compiler for NVIDIA's GPUs"
)
SCRIPT = Path(__file__).with_name("compile_attention_for_hopper.py")
SHARED_BYTES = 227 << 10  # that a program may have on compute capability 9.0


def test_attention_compiles_for_hopper_once(tmp_path: Path) -> None:
    tests = SCRIPT.parents[2]
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(tests)}
    process = subprocess.run(
        [sys.executable, SCRIPT], env=os.environ | settings, stdout=subprocess.PIPE, check=True, text=True
    )
    report = json.loads(process.stdout)
    first, *later = report["programs"]
    assert first == 5  # attention and merging, of decodes and of prompts; key scores
    assert later == [first, first]
    assert report["shared"] <= SHARED_BYTES
    assert report["no_tensor_cores"] == ["attend"]  # that of float32
