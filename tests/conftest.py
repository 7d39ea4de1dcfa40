"""Settings and fixtures shared by all tests."""

import os

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the engine does, before anything loads torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Directory of a random Qwen3 of 512 tokens' length, in float32."""
    from checkpoints import make_checkpoint  # imports transformers, which not every test needs

    return str(make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))
