"""Memory of KV blocks before their first use, as the system's own page map shows it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_checks import tiny_config
from quire.engine.core import EngineCore
from quire.engine.memory import cache_warming
from quire.engine.memory.cache_warming import CacheWarmer
from quire.kernels.devices import memory
from quire.kernels.devices.memory import PAGE, map_large_pages
from quire.scheduling.scheduler import Scheduler
from subprocesses import python_output
from thread_shortage import no_threads_to_spare

NUM_BLOCKS = 4


def num_resident(tensor: torch.Tensor) -> int:
    """Pages of `tensor` that the system has provided memory for."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.fixture
def cache() -> torch.Tensor:
    return (
        map_large_pages(NUM_BLOCKS * PAGE)[: NUM_BLOCKS * PAGE].view(torch.bfloat16).view(NUM_BLOCKS, 2, -1)
    )


def next_are(*blocks: int):
    return lambda: np.array(blocks, dtype=np.int32)


def run_to_the_end(warmer: CacheWarmer) -> None:
    warmer.resume()
    warmer.wait()


def test_the_next_blocks_get_memory_and_keep_their_contents(cache):
    cache[1, 0, :5] = torch.arange(5)
    run_to_the_end(CacheWarmer(cache, next_are(3, 1)))
    assert [num_resident(block) > 0 for block in cache] == [False, True, False, True]
    assert num_resident(cache[3]) == num_resident(cache[1]) == PAGE // mmap.PAGESIZE
    assert cache[1, 0, :5].tolist() == [0, 1, 2, 3, 4]


def test_work_ends_it_after_one_piece_and_rest_continues_it(cache, monkeypatch):
    monkeypatch.setattr(cache_warming, "PIECE_BYTES", PAGE // 2)
    populated = []

    def populate(address, _):
        populated.append(address - cache.data_ptr())
        warmer.pause()
        return True

    monkeypatch.setattr(memory, "populate", populate)
    warmer = CacheWarmer(cache, next_are(2))
    run_to_the_end(warmer)
    assert populated == [2 * PAGE]
    monkeypatch.setattr(memory, "populate", lambda _, size: populated.append(size) or True)
    run_to_the_end(warmer)
    assert populated == [2 * PAGE, PAGE // 2, PAGE // 2]
    run_to_the_end(warmer)
    assert len(populated) == 3


def test_a_system_that_cannot_is_asked_once(cache, monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "populate", lambda *piece: asked.append(piece))
    warmer = CacheWarmer(cache, next_are(0, 1))
    run_to_the_end(warmer)
    run_to_the_end(warmer)
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [next_are(NUM_BLOCKS), lambda: None, lambda: 1 / 0])
def test_a_scheduler_that_cannot_say_what_comes_next_is_asked_once(cache, caplog, answer):
    warmer = CacheWarmer(cache, answer)
    run_to_the_end(warmer)
    run_to_the_end(warmer)
    assert [record.getMessage() for record in caplog.records] == [
        "the scheduler cannot say which KV blocks come next; none will be warmed"
    ]
    assert num_resident(cache) == 0


def test_a_thread_that_cannot_be_started_is_not_waited_for(cache):
    warmer = CacheWarmer(cache, next_are(2))
    with no_threads_to_spare(), pytest.raises(RuntimeError, match="new thread"):
        warmer.resume()
    warmer.close()
    run_to_the_end(warmer)
    assert num_resident(cache[2]) > 0


def test_an_idle_engine_warms_what_its_next_step_may_use(checkpoint):
    core = EngineCore(tiny_config(checkpoint), Path(checkpoint))
    assert isinstance(core.scheduler, Scheduler)
    blocks = core.scheduler.next_blocks()
    assert blocks.tolist() == list(range(len(blocks)))
    for thread in threading.enumerate():
        if thread.name == "quire-cache-warmer":
            thread.join()
    cache = core.runner.kv_caches[0].tensor
    assert num_resident(cache) == num_resident(cache[: len(blocks)]) > 0
    core.shutdown()


@pytest.mark.processes
def test_a_program_may_end_while_blocks_are_warmed():
    program = """
import torch
from quire.engine.memory import cache_warming
from quire.kernels.devices.memory import map_large_pages
cache_warming.PIECE_BYTES = 64
cache = map_large_pages(1 << 30).view(512, -1)
warmer = cache_warming.CacheWarmer(cache, lambda: torch.arange(512).numpy())
warmer.resume()
"""
    assert python_output(program) == ""
