"""Ranks as threads of one process, of which one runs at a time: for what they compute, not how they talk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.parallel import Communicator, TensorParallel
from quire.models.shard import Shard

T = TypeVar("T")


class _Turns:
    def __init__(self, size: int) -> None:
        self.running = threading.Lock()  # the native kernels take one caller at a time
        self.barrier = threading.Barrier(size)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size


class LockstepCommunicator(Communicator):
    """Counts the bytes that this rank gives. Every rank gets the logits, so that each can run by itself."""

    def __init__(self, rank: int, turns: _Turns) -> None:
        self.num_bytes = 0
        self._rank = rank
        self._turns = turns

    def all_gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        turns = self._turns
        self.num_bytes += part.nbytes
        turns.parts[self._rank] = part.clone()
        turns.running.release()
        try:
            turns.barrier.wait(60)
            parts = list(turns.parts)
            turns.barrier.wait(60)
        finally:
            turns.running.acquire()
        assert {(each.shape, each.dtype) for each in parts} == {(part.shape, part.dtype)}
        return parts

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.all_gather(part)

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])

    def note_replay(self) -> None:
        raise AssertionError("there are no messages between these ranks, and so no whole steps")


class LockstepRanks:
    """Runs a function on every rank, each in its thread."""

    def __init__(self, size: int) -> None:
        self._turns = _Turns(size)
        self.parallel = [
            TensorParallel(Shard(rank, size), LockstepCommunicator(rank, self._turns)) for rank in range(size)
        ]

    def run(self, function: Callable[[TensorParallel], T]) -> list[T]:
        """Return the results, in the order of the ranks."""

        def call(parallel: TensorParallel) -> T:
            with self._turns.running:
                try:
                    return function(parallel)
                except BaseException:
                    self._turns.barrier.abort()
                    raise

        with ThreadPoolExecutor(len(self.parallel)) as threads:
            return list(threads.map(call, self.parallel))

    def load(self, path: Path, config: ModelConfig, options: WeightOptions | None = None) -> list[Decoder]:
        """Return the ranks' decoders."""
        return self.run(lambda parallel: load_decoder(path, config, options=options, parallel=parallel))
