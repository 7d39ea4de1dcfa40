"""The benchmark of GPUs: its arithmetic against numbers worked out by hand, and its way through an engine."""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import re
import shutil
import sys
from pathlib import Path

import gpu
import gpu_versions
import pytest
from gpu_models import model_without_files
from gpu_profile import KernelTime, profile_table
from gpu_roofline import Work, decode_bytes, decode_work, prefill_operations

import quire
import quire.kernels.triton
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


def test_what_the_kernels_of_a_decode_step_do() -> None:
    config = config_of("Llama-3-8B")
    work = decode_work(config, 64, 1_000)
    read = sum(each.bytes for each in work.values())
    rows_in_layers = 64 * 32 * (
        (4_096 + 6_144 + 4_096 + 4_096 + 4_096 + 28_672 + 14_336 + 4_096)  # of products
        + 2 * 4_096  # queries, and what they attend to
        + 2 * 4_096 + 4 * 1_024  # queries and keys are turned, and keys and values written
        + 8 * 4_096  # two norms, each of a sum that is kept, too
        + 3 * 14_336
    )  # fmt: skip
    of_ends = 64 * (4_096 + 128_256 + 2 * 4_096 + 2 * 128_256)  # the last product, the first norm, the choice
    # Norms have weights of float32 in place of the bfloat16 that are counted there, both next to nothing.
    assert read == pytest.approx(decode_bytes(config, 64, 1_000) + 2 * (rows_in_layers + of_ends), rel=1e-4)
    matrices = 8_030_261_248 - 128_256 * 4_096
    assert work["tma_linear_kernel"].operations == pytest.approx(2 * 64 * matrices, rel=1e-4)
    assert work["attend"].operations == 4 * 64 * 1_000 * 4_096 * 32
    more = decode_work(config, 256, 1_000)  # whose products are gated before they are stored
    assert set(work) - set(more) == {"_gated_activation_kernel"}
    matrices_read = 2 * matrices
    stored = [each["tma_linear_kernel"].bytes - matrices_read for each in (work, more)]
    assert 4 * stored[0] - stored[1] == pytest.approx(2 * 256 * 32 * 14_336, rel=1e-2)


def test_what_the_experts_of_a_decode_step_do() -> None:
    config = config_of("Qwen3-30B-A3B")
    one, all_of_them = (decode_work(config, count, 0)["expert_product_kernel"] for count in (1, 10**6))
    experts = 48 * 128 * 3 * 2_048 * 768
    assert one.operations == 2 * experts * 8 / 128
    assert one.bytes == pytest.approx(2 * experts * 8 / 128, rel=1e-2)
    assert all_of_them.bytes > 2 * experts
    assert "_gated_activation_kernel" not in decode_work(config, 1, 0)


def test_work_is_of_kernels_that_there_are() -> None:
    modules = pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton.")
    launched = {
        name
        for module in modules
        for name, item in vars(importlib.import_module(module.name)).items()
        if hasattr(item, "run")
    }
    for name in ("Llama-3-8B", "Qwen3-30B-A3B"):
        for num_requests in (1, 64):
            assert launched.issuperset(decode_work(config_of(name), num_requests, 1))


def test_kernels_stand_beside_their_limits() -> None:
    times = [KernelTime("product", 2e-3, 4.0), KernelTime("other", 1e-3, 0.5)]
    _, product, other, together = profile_table(times, {"product": Work(3e6, 8e9)}, 3e9, 5e12)
    assert product.split() == ["product", "2.0000", "4.0", "3.00", "2", "8.00", "0.80"]
    assert other.split() == ["other", "1.0000", "0.5"]
    assert together.split() == ["all", "3.0000", "4.5"]


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
    command = [sys.executable, str(script), "--num-requests", "1", "--num-steps", "4"]
    done = subprocesses.run(command, preload=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"decode, 1 requests: \d+\.\d{3} ms of the host\n", done.stdout)


def test_versions_are_measured_side_by_side(tmp_path: Path) -> None:
    """The second one has other logits."""
    source = Path(quire.__file__).parents[1]
    other = tmp_path / "src"
    shutil.copytree(source / "quire", other / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "quire" / "models" / "decoder.py").open("a") as file:
        file.write("\n_logits = Decoder.logits\nDecoder.logits = lambda *args: _logits(*args) * 1.5\n")
    script = Path(gpu.__file__).with_name("gpu_versions.py")
    sources = [str(source), str(other), str(source)]
    options = ["--tiny", "--num-requests", "1", "2", "--rounds", "2"]
    done = subprocesses.run([sys.executable, str(script), *sources, *options])
    assert done.returncode == 0, done.stderr
    line = r"Qwen3-0\.6B, (\d) requests: +\d+\.\d{3} ms +(\d+\.\d\d)   (same|other) bits   (\S+)"
    found = [re.fullmatch(line, text) for text in done.stdout.splitlines()]
    told = [(match[1], match[3], match[4]) for match in found if match]
    assert told == [
        (count, bits, path)
        for count in ("1", "2")
        for bits, path in zip(("same", "other", "same"), sources, strict=True)
    ]
    assert [match[2] for match in found[::3] if match] == ["1.00", "1.00"]


def test_recordings_stand_beside_the_first_version_s() -> None:
    task = gpu_versions.Task("Qwen3-0.6B", 0, 1, 8, 4, is_tiny=True)
    found = [
        [{"step": 2e-3, "captured": 1e-3, "bits": 1}, {"step": 4e-3, "captured": 3e-3, "bits": 1}],
        [{"step": 6e-3, "captured": 1e-3, "bits": 1}, {"step": 6e-3, "captured": 2e-3, "bits": 2}],
    ]
    assert list(gpu_versions.compare(["old", "new"], task, 1, found)) == [
        "Qwen3-0.6B, 1 requests:    3.000 ms  1.00   captured    2.000 ms  1.000   same bits   old",
        "Qwen3-0.6B, 1 requests:    6.000 ms  2.00   captured    1.500 ms  0.750   other bits   new",
    ]


def test_what_recording_saves_the_host_needs_no_gpu() -> None:
    script = Path(gpu.__file__).with_name("gpu_launches.py")
    options = ["--measure", "launches", "replays", "--num-tokens", "20", "--num-steps", "400"]
    command = [sys.executable, str(script), *options]
    done = subprocesses.run(command, preload=True)
    assert done.returncode == 0, done.stderr
    *models, documents, dialogues = done.stdout.splitlines()
    figures = r"\S+: \d+\.\d\d ms of the host one by one, \d+\.\d\d ms captured, \d+\.\d\d"
    assert len(models) == 3
    assert all(re.fullmatch(figures, line) for line in models)
    for line in (documents, dialogues):
        steps, captured, again, added = map(int, re.findall(r" (\d+)(?: steps| captured|%)", line))
        assert 0 < captured < steps
        assert 0 < again < 100
        assert 0 < added <= 50
