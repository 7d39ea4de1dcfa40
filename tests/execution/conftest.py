"""One small model in two types, and prompts for it."""

import numpy as np
import pytest

from checkpoints import make_checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3")
    loaded = {}
    for dtype in ("float32", "bfloat16"):
        path = make_checkpoint("qwen3", root / dtype, dtype=dtype)
        loaded[dtype] = load_decoder(path, read_model_config(path), dtype)
    return loaded


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 380, length).tolist() for length in (1, 3, 17, 40, 61)]
