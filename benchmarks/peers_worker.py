"""The worker process of an engine: loads a model, and runs workloads given as lines of JSON.

A worker prints `{"versions": {...}}` once it has imported the packages of its engine, and `{"ready": true}`
once it has loaded the model and generated one token; then, for each line `{"prompts": [[ids]],
"output_tokens": n, "shared_tokens": n}` on standard input, `{"seconds": s, "outputs": [[ids]]}`. It ends when
its input ends. Anything else that libraries print to standard output goes to standard error.

Plain Python only: every worker imports this module in its own environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from peers_shapes import SHAPES, ModelShape
from peers_workload import FIRST_ORDINARY_TOKEN, PRECISIONS

FIRST_PROMPT = [FIRST_ORDINARY_TOKEN + number for number in range(8)]


class Engine(Protocol):
    """A loaded model."""

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """Prepare for this number of requests; if `prefix` is not empty, cache its keys and values."""

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Complete all prompts together, greedily, ignoring end-of-sequence; return the generated ids."""


MakeEngine = Callable[[str, str, ModelShape], Engine]


def versions_of(*packages: str) -> dict[str, str]:
    """Return the installed versions of packages."""
    return {package: importlib.metadata.version(package) for package in packages}


def serve(make: MakeEngine, packages: tuple[str, ...]) -> None:
    """Run a worker; `make` is called with the path of the model, the precision and the shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    answer(versions=versions_of(*packages))
    engine = make(options.model, options.precision, SHAPES[options.shape])
    engine.prepare(1, [])
    engine.generate([FIRST_PROMPT], 1)  # otherwise, an engine that defers work would look ready early
    answer(ready=True)
    for line in sys.stdin:
        answer(**_timed(engine, **json.loads(line)))


def _timed(
    engine: Engine, prompts: list[list[int]], output_tokens: int, shared_tokens: int
) -> dict[str, Any]:
    engine.prepare(len(prompts), prompts[0][:shared_tokens])
    started = time.perf_counter()
    outputs = engine.generate(prompts, output_tokens)
    return {"seconds": time.perf_counter() - started, "outputs": outputs}
