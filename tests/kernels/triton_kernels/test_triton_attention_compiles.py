"""What the interpreter does not show: whether the kernels are what Triton's compiler takes, and how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "triton.backends.nvidia", reason="this machine's Triton has no compiler for NVIDIA's GPUs"
)
SCRIPT = Path(__file__).with_name("compile_attention_for_hopper.py")
SHARED_BYTES = {"90": 227 << 10, "89": 99 << 10, "80": 163 << 10}  # that a program may have


def report_of(script: Path, capability: str, cache: Path) -> dict[str, Any]:
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(script.parents[2])}
    process = subprocess.run(
        [sys.executable, script, capability],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@pytest.mark.parametrize("capability", ["89", "80"])
def test_attention_fits_into_the_shared_memory_of_smaller_gpus(capability: str, tmp_path: Path) -> None:
    script = SCRIPT.with_name("compile_attention_for_others.py")
    assert report_of(script, capability, tmp_path)["shared"] <= SHARED_BYTES[capability]


def test_attention_compiles_for_hopper_once(tmp_path: Path) -> None:
    report = report_of(SCRIPT, "90", tmp_path)
    first, *later = report["programs"]
    assert first == 5  # attention and merging, of decodes and of prompts; key scores
    assert later == [first, first]
    assert report["shared"] <= SHARED_BYTES["90"]
    assert report["no_tensor_cores"] == ["attend"]  # that of float32
