"""Measures how fast `pull_blocks` moves KV from process to process, beside what else moves as many bytes.

    python benchmarks/datadist.py [--num-blocks 512] [--num-rounds 7] [--checksum 1]

The KV is that of Qwen3-0.6B in bfloat16 (28 layers, 8 KV heads, head size 128), in blocks of 16 tokens. A
block-major cache is one tensor whose dimension 0 is the block; a layer-major cache has K and V of each layer
as tensors of their own. Adjacent blocks are pulled into adjacent blocks, shuffled ones from random blocks
into random blocks. All memory has been touched before. Rounds of all rows alternate, and ratios are those of
the same round: to one memcpy, and to the row that the transport is compared with.

- shared memory: memcpy of as many bytes, in one call and one thread.
- TCP: plain sockets, as many as the transport has, each with a thread at both ends.
- NIXL: one transfer of NIXL with the same descriptors; and with one for K and V of each layer and block, as
  caches have them that are not block-major.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from datadist_raw import NixlReader, NixlSource, SocketSource, has_nixl, socket_read

from quire.datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from quire.datadist.interface.options import DEFAULT_TCP_STREAMS

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 28, 8, 128, 16
PART_BYTES = NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE * 2  # K or V of a layer in a block
BLOCK_BYTES = NUM_LAYERS * 2 * PART_BYTES
LAYOUTS = {
    "block-major": lambda blocks: CacheDesc(
        1, [blocks, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE], DataType.DT_BF16
    ),
    "layer-major": lambda blocks: CacheDesc(
        2 * NUM_LAYERS, [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE], DataType.DT_BF16
    ),
}
PROMPT_ID = 1

Act = Callable[[], None]


@dataclasses.dataclass
class Row:
    """Something that moves the bytes.

    Attributes:
        act: moves all of them once.
        reference: name of the row that it is compared with, beside memcpy.
        seconds: of each round.
    """

    act: Act
    reference: str | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    def measure(self) -> None:
        """Add a round."""
        begin = time.perf_counter()
        self.act()
        self.seconds.append(time.perf_counter() - begin)


def transports() -> list[str]:
    """Return names of the transports that there are here."""
    return ["shared_memory", "tcp", *(["nixl"] if has_nixl() else [])]


def start(role: LLMRole, cluster_id: int, transports: list[str], checksum: str) -> LLMDataDist:
    """Return a side that has these transports."""
    config = LLMConfig()
    config.device_id, config.sync_kv_timeout = 0, 600_000
    config.listen_ip_info = "127.0.0.1:0"
    config.ge_options = {
        "quire.device": "cpu",
        "quire.transports": ",".join(transports),
        "quire.checksum": checksum,
    }
    side = LLMDataDist(role, cluster_id)
    side.init(config.generate_options())
    return side


def tensors_of(manager: Any, cache: Any) -> list[torch.Tensor]:
    """Return all tensors of a cache."""
    indices = range(cache.cache_desc.num_tensors)
    return [manager.get_cache_tensors(cache, index)[0].torch() for index in indices]


def serve(connection: Connection, num_blocks: int, checksum: str) -> None:
    """Be the PROMPT, and the source of plain sockets and NIXL, until the other process says otherwise."""
    prompt = start(LLMRole.PROMPT, PROMPT_ID, transports(), checksum)
    manager = prompt.kv_cache_manager
    caches, tensors = [], []
    for model, layout in enumerate(LAYOUTS.values()):
        cache = manager.allocate_blocks_cache(layout(num_blocks), BlocksCacheKey(PROMPT_ID, model))
        caches.append(cache)  # else it would be released
        tensors.append(tensors_of(manager, cache))
        for tensor in tensors[-1]:
            tensor.fill_(model + 1)
    source = SocketSource(tensors[0][0].view(-1).view(torch.uint8), DEFAULT_TCP_STREAMS)
    nixl = NixlSource([*tensors[0], *tensors[1]]).address if has_nixl() else None
    connection.send((prompt.listen_port, source.address, nixl))
    connection.recv()
    prompt.finalize()


class Rows:
    """All that is measured, by name, layout and order of the blocks.

    Args:
        num_blocks: that are moved.
        addresses: what `serve` has sent.
        checksum: whether transfers have one, `0` or `1`.
    """

    def __init__(self, num_blocks: int, addresses: Any, checksum: str) -> None:
        self._num_blocks = num_blocks
        self._port, self._socket_address, self._nixl_address = addresses
        self._checksum = checksum
        random = np.random.default_rng(0)
        adjacent = np.arange(num_blocks)
        self._orders = {
            "adjacent": (adjacent, adjacent),
            "shuffled": (random.permutation(num_blocks), random.permutation(num_blocks)),
        }
        self.by_name: dict[tuple[str, str, str], Row] = {}
        self._decoders = [self._start(index, one) for index, one in enumerate(transports())]
        self._caches = [self._allocate(decoder) for decoder in self._decoders]
        self._add_memcpy()
        self._add_sockets()
        if self._nixl_address is not None:
            self._add_nixl()
        for index, transport in enumerate(transports()):
            self._add_pulls(index, transport)

    def _start(self, index: int, transport: str) -> LLMDataDist:
        decoder = start(LLMRole.DECODER, 100 + index, [transport], self._checksum)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = PROMPT_ID
        peer.append_remote_ip_info("127.0.0.1", self._port)
        assert decoder.link_clusters([peer], 30_000)[0] is LLMStatusCode.LLM_SUCCESS
        return decoder

    def _allocate(self, decoder: LLMDataDist) -> list[Any]:
        manager = decoder.kv_cache_manager
        return [manager.allocate_blocks_cache(layout(self._num_blocks)) for layout in LAYOUTS.values()]

    def _tensors(self, index: int, layout: int) -> list[torch.Tensor]:
        return tensors_of(self._decoders[index].kv_cache_manager, self._caches[index][layout])

    def _add_memcpy(self) -> None:
        (target,) = self._tensors(0, 0)
        source = torch.ones_like(target)
        self.by_name["memcpy", "", ""] = Row(
            lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        )

    def _add_sockets(self) -> None:
        (target,) = self._tensors(1, 0)
        read = socket_read(self._socket_address, target.view(-1).view(torch.uint8), DEFAULT_TCP_STREAMS)
        self.by_name["plain sockets", "", ""] = Row(read)

    def _add_nixl(self) -> None:
        metadata, addresses = self._nixl_address
        here = [*self._tensors(2, 0), *self._tensors(2, 1)]
        reader = NixlReader(metadata, here)
        mine = [one.data_ptr() for one in here]
        for order, (sources, targets) in self._orders.items():
            whole = reader.read(
                addresses[0] + sources * BLOCK_BYTES, mine[0] + targets * BLOCK_BYTES, BLOCK_BYTES
            )
            parts = [
                np.concatenate([start + blocks * PART_BYTES for start in starts])
                for starts, blocks in ((addresses[1:], sources), (mine[1:], targets))
            ]
            self.by_name["plain NIXL", "block-major", order] = Row(whole)
            self.by_name["plain NIXL", "layer-major", order] = Row(reader.read(*parts, PART_BYTES))

    def _add_pulls(self, index: int, transport: str) -> None:
        manager = self._decoders[index].kv_cache_manager
        for model, layout in enumerate(LAYOUTS):
            cache = self._caches[index][model]
            for order, (sources, targets) in self._orders.items():

                def pull(model=model, cache=cache, at=(sources, targets)) -> None:
                    manager.pull_blocks(BlocksCacheKey(PROMPT_ID, model), cache, *at)

                for tensor in self._tensors(index, model):
                    tensor.zero_()
                pull()
                assert all((tensor == model + 1).all() for tensor in self._tensors(index, model))
                self.by_name[transport, layout, order] = Row(pull, self._reference(transport, layout, order))

    @staticmethod
    def _reference(transport: str, layout: str, order: str) -> tuple[str, str, str] | None:
        references = {"tcp": ("plain sockets", "", ""), "nixl": ("plain NIXL", layout, order)}
        return references.get(transport)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure how fast KV is pulled.")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--checksum", choices=["0", "1"], default="1")
    arguments = parser.parse_args()
    here, there = multiprocessing.Pipe()
    given = there, arguments.num_blocks, arguments.checksum
    prompt = multiprocessing.get_context("spawn").Process(target=serve, args=given, daemon=True)
    prompt.start()
    rows = Rows(arguments.num_blocks, here.recv(), arguments.checksum).by_name
    for _ in range(arguments.num_rounds):
        for row in rows.values():
            row.measure()
    here.send("end")
    prompt.join()
    num_bytes = arguments.num_blocks * BLOCK_BYTES
    print(f"{num_bytes / 1e6:.0f} MB, {arguments.num_rounds} rounds, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, Linux {platform.release()}\n")
    print("| | layout | blocks | best GB/s | median GB/s | of memcpy | of its reference |")
    print("|---" * 7 + "|")
    for name, row in rows.items():
        rates = [num_bytes / taken(row.seconds) / 1e9 for taken in (min, statistics.median)]
        cells = [*name, *(f"{rate:.1f}" for rate in rates), ratio(rows["memcpy", "", ""], row)]
        print(f"| {' | '.join(cells)} | {ratio(rows[row.reference], row) if row.reference else ''} |")
    if not has_nixl():
        print("\nNIXL cannot be imported here.")


def ratio(reference: Row, row: Row) -> str:
    """Return the median of how fast a row is, in parts of another in the same round."""
    return f"{statistics.median(a / b for a, b in zip(reference.seconds, row.seconds, strict=True)):.0%}"


if __name__ == "__main__":
    main()
