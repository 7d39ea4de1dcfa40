"""The benchmark of two models in one server, with the built-in model and a small encoder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import embed_beside_generation as benchmark
import pytest

from encoders import make_encoder, save_encoder

pytestmark = pytest.mark.programs


def test_both_models_answer(tmp_path: Path) -> None:
    encoder = save_encoder(make_encoder("bert"), tmp_path / "bert")
    with benchmark.serving("mini", str(encoder), 1) as url:
        for load, kinds in (("embeddings", ["embeddings"]), ("both", ["generation", "embeddings"])):
            figures = asyncio.run(benchmark.measured(url, load, 1.0))
            assert list(figures) == kinds
            assert all(one["per_second"] > 0 and one["p99_ms"] > 0 for one in figures.values())
