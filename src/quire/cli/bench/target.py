"""Interface of benchmark targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.cli.bench.workload import BenchRequest

if TYPE_CHECKING:
    import numpy as np


class RequestUsage(NamedTuple):
    """Token counts of a finished request: those generated, and those found in the prefix cache."""

    num_output_tokens: int
    num_cached_tokens: int


class Target(Protocol):
    """Serves requests and streams their outputs."""

    vocabulary: np.ndarray
    """Token ids [n] that prompts consist of."""

    max_model_len: int | None
    """Maximum number of tokens of a prompt and its output together; None if unknown."""

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> RequestUsage:
        """Run one request to its end.

        Args:
            on_output: called when an output with new tokens is received.

        Raises:
            QuireError: the request failed.
            EngineDeadError: the engine has ended; all other requests will fail too.
        """
