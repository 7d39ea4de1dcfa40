"""One small random model for all engine tests."""

from __future__ import annotations

import pytest

from checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Directory of a random Qwen3 of 512 tokens' length, in float32."""
    return str(make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))
