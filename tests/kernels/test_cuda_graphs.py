"""Capture CUDA graphs, with stand-ins for what torch asks of a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.kernels.devices import torch_internals
from quire.kernels.devices.cuda_graphs import CudaGraphs


class Torch:
    """What torch keeps of streams and pools of memory.

    As in torch 2.13, a capture that fails at its end leaves its stream the current one, and is under way
    for both allocators; that of pinned memory cannot be told that it is not.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = "default"
        self.fails = False
        self.uses: dict[int, int] = {}  # of pools
        self.under_way: set[int] = set()
        self.under_way_for_pinned: set[int] = set()
        numbers = itertools.count()
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)
        of_name = {"_C._cuda_endAllocateToPool": self.end, "_C._cuda_releasePool": self.release}
        patch.setattr(torch_internals, "torch_operator", of_name.__getitem__)

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, _graph: object, *, pool: int, **_options: object) -> Iterator[None]:
        assert not self.under_way, "torch.cuda.empty_cache() raises"
        self.current = "of captures"
        self.uses[pool] = self.uses.get(pool, 0) + 1
        for under_way in (self.under_way, self.under_way_for_pinned):
            if pool in under_way:
                raise RuntimeError("already capture to mempool_id")
            under_way.add(pool)
        try:
            yield
        finally:
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.under_way.remove(pool)
            self.under_way_for_pinned.remove(pool)
            self.current = "default"

    def end(self, _device: int, pool: int) -> None:
        if pool not in self.under_way:
            raise RuntimeError("not currently capture to mempool_id")
        self.under_way.remove(pool)

    def release(self, _device: int, pool: int) -> None:
        self.uses[pool] -= 1


class Graph:
    replay = Callable[[], None]


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_a_recording_that_fails_leaves_the_current_stream(fake_torch: Torch) -> None:
    fake_torch.fails = True
    seen: list[str] = []
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs().capture(lambda: seen.append(fake_torch.current))
    assert seen == ["of captures"]
    assert fake_torch.current == "default"


def test_steps_are_captured_after_a_recording_that_cuda_has_ended(fake_torch: Torch) -> None:
    graphs = CudaGraphs()
    graphs.capture(lambda: None)
    fake_torch.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="during capture"):
            graphs.capture(lambda: None)
    fake_torch.fails = False
    assert graphs.capture(lambda: None) is Graph.replay
    assert list(fake_torch.uses.values()) == [1, 0, 1], "memory of what there is no graph for"


def test_after_an_error_of_its_own_a_recording_has_ended_and_others_share_its_memory(
    fake_torch: Torch,
) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    graphs = CudaGraphs()
    with pytest.raises(MemoryError, match="no room"):
        graphs.capture(fail)
    assert graphs.capture(lambda: None) is Graph.replay
    assert len(fake_torch.uses) == 1
