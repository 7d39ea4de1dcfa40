"""Reading models that are made to do harm: wrong metadata, and limits of what reading takes."""

from __future__ import annotations

import random
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

from gguf_checkpoints import write_gguf

from checkpoints import make_checkpoint, make_tokenizer
from quire.errors import ModelError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.weights import weight_specs

PYTHON_BYTES = 64 << 20  # that reading a file of some hundred kB may take
LONGEST_ERROR = 2000  # characters
NUMBERS = [0, -1, 1, 7, 2**31, 2**32 - 1, 2**63, 10**30, 1e308, float("nan"), float("inf")]
OTHERS = [True, None, "x", [], {}, [[]], "x" * 5000, ["x" * 5000]]


def make_gguf_model(path: Path) -> Path:
    """Write a GGUF file with a tokenizer, and return it; `path` is of the checkpoint that it is made from."""
    make_checkpoint("llama-3.1", path, intermediate_size=128)
    make_tokenizer(path)
    return write_gguf(path, "llama-3.1", "Q8_0", has_tokenizer=True)[0]


def read_all(path: Path) -> None:
    """Read everything of a model as a start does."""
    config = read_model_config(path)
    with Checkpoint(path) as checkpoint:
        specs = list(weight_specs(config))
        checkpoint.check_names(specs, config)
        for spec in specs:
            for source in spec.sources:
                checkpoint.tensor(source)
    read_tokenizer(path)


def read_within_memory(path: Path) -> None:
    """Read a model; check that it takes little memory, and that an error is a short `ModelError`."""
    tracemalloc.start()
    try:
        read_all(path)
    except ModelError as error:
        assert len(str(error)) < LONGEST_ERROR
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PYTHON_BYTES


def put_wrong_values(values: Any, chosen: random.Random) -> None:
    """Replace one to three values somewhere in `values`."""
    for _ in range(chosen.randint(1, 3)):
        holder, key = _place(values, chosen)
        holder[key] = deepcopy(chosen.choice([*NUMBERS, *OTHERS]))


def _place(values: Any, chosen: random.Random) -> tuple[Any, Any]:
    """Return a container somewhere in `values` and one of its keys."""
    while True:
        key = chosen.choice(list(values)) if isinstance(values, dict) else chosen.randrange(len(values))
        inner = values[key]
        if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.3:
            return values, key
        values = inner
