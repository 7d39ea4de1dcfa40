"""The benchmark of GPUs: its arithmetic against numbers worked out by hand, and its way through an engine."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import pytest
from gpu_models import model_without_files
from gpu_roofline import decode_bytes, prefill_operations

import gpu
import subprocesses
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig


def config_of(name: str) -> ModelConfig:
    with model_without_files(name, is_tiny=False) as directory:
        return read_model_config(Path(directory))


def test_bytes_of_a_decode_step() -> None:
    config = config_of("Llama-3-8B")
    # 8.03 * 10^9 parameters but for the embedding, and 128 kB of KV for each token.
    weights = 2 * (8_030_261_248 - 128_256 * 4_096)
    assert decode_bytes(config, 1, 0) == weights
    assert decode_bytes(config, 64, 1_000) == weights + 64 * 1_000 * 131_072


def test_bytes_of_the_experts_that_are_read() -> None:
    config = config_of("Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2_048 * 768 * 2
    total = 2 * (30_532_122_624 - 151_936 * 2_048)
    assert decode_bytes(config, 10**6, 0) == pytest.approx(total)
    assert decode_bytes(config, 1, 0) == pytest.approx(total - experts * (1 - 8 / 128))
    assert decode_bytes(config, 2, 0) == pytest.approx(total - experts * (1 - 8 / 128) ** 2)


def test_operations_of_prompts() -> None:
    config = config_of("Llama-3-8B")
    matrices = 8_030_261_248 - 2 * 128_256 * 4_096
    attention = 4 * 32 * 32 * 128 * (1 + 2 + 3)
    assert prefill_operations(config, 5, 3) == pytest.approx(5 * (2 * 3 * matrices + attention), rel=1e-6)


def test_rows_of_a_mixture_of_experts() -> None:
    rows = list(gpu.of_models(["Qwen3-30B-A3B"], gpu.TINY, bandwidth=1e9, rate=1e9))
    assert [row.name for row in rows] == [f"Qwen3-30B-A3B, decode, {count} requests" for count in (1, 2)]
    assert all(math.isfinite(row.ratio) and row.ratio > 0 for row in rows)


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(models=["Qwen3-0.6B"], json=False, tiny=False)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: options)
    monkeypatch.setattr(gpu, "cuda_obstacle", lambda: "torch sees no GPU")
    assert gpu.main() == 2
    assert capsys.readouterr().err == "nothing was measured: torch sees no GPU\n"


def test_the_host_s_part_of_a_step_needs_no_gpu() -> None:
    script = Path(gpu.__file__).with_name("gpu_host.py")
    done = subprocesses.run([sys.executable, str(script), "--num-requests", "1", "--num-steps", "4"])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"decode, 1 requests: \d+\.\d{3} ms of the host\n", done.stdout)
