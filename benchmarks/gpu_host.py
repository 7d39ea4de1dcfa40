"""What a decode step on a GPU costs the host, measured without one.

    python benchmarks/gpu_host.py [--num-requests 1 64] [--num-steps 300]

The engine plans steps and asks for them as on a GPU: one in flight, captured and replayed. The GPU is a
stand-in for which nothing takes time: steps of new sizes, which are computed in Triton's interpreter with a
model of one tiny layer, are not in the figures; a replay computes nothing, and the tokens are there at once.
What calls of CUDA take is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_engine import decode_seconds
from gpu_models import model_without_files

from quire import LLM
from quire.engine.building import runner as runner_building
from quire.execution.sampling import tokens_in_flight
from quire.kernels.sampling.token_choice import TokenChoice
from quire.kernels.size_classes import size_class
from quire.kernels.triton.kernel_set import TritonKernels

CONTEXT = 20  # tokens of a request; more would take the interpreter longer, and the host not


class OneToken(TokenChoice):
    """Chooses the same token every time."""

    def choose(self, logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TokenChoice`."""
        return torch.full((len(logits),), 7), torch.zeros(len(logits))

    def logprobs(self, *_: Any) -> Any:
        """Nobody asks for any."""
        raise NotImplementedError


class ArrivedCopy:
    """A copy that is there."""

    has_arrived = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """Return it."""
        return self._tensor


def replaying_nothing(config: Any, model: Any) -> Callable[[Any], Callable[[], None]]:
    """Return a `Capture` whose captures do nothing."""
    model.reserve(size_class(config.scheduler.max_num_batched_tokens))
    return lambda _compute: lambda: None


@contextlib.contextmanager
def engine(max_num_seqs: int) -> Iterator[LLM]:
    """Open an engine that takes it that a GPU computes."""
    with (
        mock.patch.object(TritonKernels, "sampling", OneToken()),
        mock.patch.object(tokens_in_flight, "HostCopy", ArrivedCopy),
        mock.patch.object(runner_building, "_capture", replaying_nothing),
        model_without_files("Qwen3-0.6B", is_tiny=True, num_hidden_layers=1) as directory,
        LLM(
            directory,
            dtype="bfloat16",
            kernels="triton",
            overlap_steps=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8_192,
            max_model_len=1_024,
            num_kv_blocks=64 * max_num_seqs,
        ) as llm,
    ):
        yield llm


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", nargs="+", type=int, default=[1, 64], help="default: 1 and 64")
    parser.add_argument("--num-steps", type=int, default=300, help="of each request; default: 300")
    options = parser.parse_args()
    for count in options.num_requests:
        with engine(count) as llm:
            decode_seconds(llm, count, CONTEXT, options.num_steps)  # has all sizes captured
            seconds = decode_seconds(llm, count, CONTEXT, options.num_steps)
        print(f"decode, {count} requests: {seconds * 1e3:.3f} ms of the host", flush=True)


if __name__ == "__main__":
    main()
