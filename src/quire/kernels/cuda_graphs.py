"""Recording what a GPU is asked for, to ask for it again at once: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraphs:
    """Records on the current GPU. Recordings are replayed one after the other, and share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record what `compute` asks the GPU for, which computes nothing; return what replays it.

        What `compute` allocates is the recording's, and free again for the next one: results must be in
        memory of its own.
        """
        graph = torch.cuda.CUDAGraph()
        # If a recording fails at its end, torch leaves its own stream the current one, and what this thread
        # asks for next would not wait for what others ask for.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            compute()
        return graph.replay
