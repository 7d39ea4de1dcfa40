"""What the interpreter does not show: whether the kernels are what Triton's compiler takes, and how often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiled import output_of

pytest.importorskip(
    "triton.backends.nvidia", reason="this machine's Triton has no compiler for NVIDIA's GPUs"
)
SHARED_BYTES = {"90": 227 << 10, "89": 99 << 10, "80": 163 << 10}  # that a program may have


@pytest.mark.parametrize(("capability", "how_far"), [("80", []), ("89", ["shared"])])
def test_attention_fits_into_the_shared_memory_of_smaller_gpus(
    capability: str, how_far: list[str], tmp_path: Path
) -> None:
    """What 8.0 has instructions for, 8.9 has, too."""
    report = json.loads(output_of("compile_attention_for_others.py", tmp_path, capability, *how_far))
    assert report["programs"] == 15  # what does not compile is none
    assert report["shared"] <= SHARED_BYTES[capability]


def test_attention_compiles_for_hopper_once(tmp_path: Path) -> None:
    report = json.loads(output_of("compile_attention_for_hopper.py", tmp_path))
    first, *later = report["programs"]
    assert first == 5  # attention and merging, of decodes and of prompts; key scores
    assert later == [first, first]
    assert report["two_sided"] > 0
    assert report["latents"] > 0
    assert report["shared"] <= SHARED_BYTES["90"]
    assert report["no_tensor_cores"] == ["attend"]  # that of float32
    dense, selecting = report["orders"]
    assert dense == selecting  # or bits would differ
    assert len(dense) == 1
