"""Recording CUDA graphs, with stand-ins for what torch asks of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from quire.kernels.cuda_graphs import CudaGraphs


class Streams:
    """Which stream is the current one."""

    def __init__(self) -> None:
        self.current = "default"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, _graph: object, **_options: object) -> Iterator[None]:
        """As torch's where a recording fails at its end: the stream stays its own."""
        self.current = "of recordings"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_recording_that_fails_leaves_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "graph", streams.graph)
    seen: list[str] = []
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs().record(lambda: seen.append(streams.current))
    assert seen == ["of recordings"]
    assert streams.current == "default"
