"""The side of an engine: a process that loads a model and runs what it is told to, in lines of JSON.

A worker prints `{"versions": {...}}` once it has imported its engine's packages and `{"ready": true}` when
it has loaded and answered one token; then, for each line `{"prompts": [[ids]], "output_tokens": n,
"shared_tokens": n}` on standard input, `{"seconds": s, "outputs": [[ids]]}`. It ends at the end of its input.
Whatever else a library prints to standard output goes to standard error.

Plain Python only: every worker imports it in an environment of its own.
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

from peers_workload import FIRST_ORDINARY_TOKEN, PRECISIONS

FIRST_PROMPT = [FIRST_ORDINARY_TOKEN + number for number in range(8)]


class Engine(Protocol):
    """A loaded model."""

    def prepare(self, num_requests: int, prefix: list[int]) -> None:
        """Make ready for that many requests; if `prefix` is not empty, have its keys and values cached."""

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Complete all prompts together, greedily and past any end of sequence; return the new ids."""


MakeEngine = Callable[[str, str], Engine]


def versions_of(*packages: str) -> dict[str, str]:
    """Return the installed versions of distributions."""
    return {package: importlib.metadata.version(package) for package in packages}


def serve(make: MakeEngine, packages: tuple[str, ...]) -> None:
    """Be a worker: `make` gets the model's path and the precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    answer(versions=versions_of(*packages))
    engine = make(options.model, options.precision)
    engine.prepare(1, [])
    engine.generate([FIRST_PROMPT], 1)  # or one that puts work off would look ready early
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
