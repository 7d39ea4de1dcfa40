"""Capture launches and replay them at once: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.devices.torch_internals import end_failed_capture

_failed: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA has ended with an error; torch goes on asking them when it allocates pinned memory."""


class CudaGraphs:
    """Captures on the current GPU. Captures are replayed one after the other, and share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `compute`, which computes nothing; return what replays them.

        What `compute` allocates is the capture's, and free again for the next one: results must be in
        memory of its own. After one that fails, others may succeed.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # If a capture fails at its end, torch leaves its own stream the current one, and what this
            # thread asks for next would not wait for what others ask for.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                compute()
        except Exception:
            if end_failed_capture(self._pool):
                _failed.append(graph)
                self._pool = torch.cuda.graph_pool_handle()  # torch captures nothing more to the one before
            raise
        return graph.replay
