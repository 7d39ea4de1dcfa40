"""What the tests of both sides have in common; importable in processes without pytest."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import numpy as np
import torch

from quire.datadist import (
    CacheDesc,
    DataType,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMModel,
    LLMReq,
    LLMRole,
    LLMStatusCode,
    ModelRunner,
    Tensor,
    set_default_runner_factory,
)

POOL = 1 << 16  # bytes
PATIENT = 60_000  # milliseconds; no test waits for so long


def options(
    *,
    pool: int = POOL,
    timeout: int = PATIENT,
    transport: str = "shared_memory,tcp",
    token: str = "",
    listen: str | None = None,
) -> dict[str, str]:
    """Return what `init` takes, for a side that listens if `listen` is an address."""
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = timeout
    config.ge_options = {
        "ge.flowGraphMemMaxSize": str(pool),
        "quire.device": "cpu",
        "quire.token": token,
        "quire.transports": transport,
    }
    if listen is not None:
        config.listen_ip_info = listen
    return config.generate_options()


def start_prompt(
    cluster_id: int = 1, *, ip: str = "127.0.0.1", port: int = 0, **settings: Any
) -> LLMDataDist:
    prompt = LLMDataDist(LLMRole.PROMPT, cluster_id)
    prompt.init(options(listen=f"{ip}:{port}", **settings))
    return prompt


def start_decoder(cluster_id: int = 2, **settings: Any) -> LLMDataDist:
    decoder = LLMDataDist(LLMRole.DECODER, cluster_id)
    decoder.init(options(**settings))
    return decoder


def cluster_info(remote_cluster_id: int, port: int, ip: str = "127.0.0.1") -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = remote_cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(ip, port)
    return info


def set_timeout(manager: KvCacheManager, timeout: int) -> None:
    """Change the time limit of a manager's calls [milliseconds]."""
    manager._timeout = timeout / 1000


def byte_desc(num_slots: int = 2, slot_bytes: int = 64, num_tensors: int = 4) -> CacheDesc:
    return CacheDesc(num_tensors, [num_slots, slot_bytes], DataType.DT_UINT8)


def described(**changes: Any) -> CacheDesc:
    """Return a description of two tensors of two slots of three bytes, but for `changes`."""
    arguments = {"num_tensors": 2, "shape": [2, 3], "data_type": DataType.DT_INT8, **changes}
    return CacheDesc(**arguments)


def pattern(desc: CacheDesc, seed: int) -> np.ndarray:
    """Return bytes for a whole cache: [num_tensors, slots, slot_bytes], different for each seed."""
    size = (desc.num_tensors, desc.shape[0], desc.slot_bytes)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def byte_view(manager: KvCacheManager, cache: KvCache, tensor_index: int) -> torch.Tensor:
    """Return a tensor of a cache as bytes: [slots, slot_bytes]."""
    tensor = manager.get_cache_tensors(cache, tensor_index)[0].torch()
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)


def write_cache(manager: KvCacheManager, cache: KvCache, seed: int) -> None:
    """Fill a cache with `pattern`."""
    for index, values in enumerate(pattern(cache.cache_desc, seed)):
        byte_view(manager, cache, index).copy_(torch.from_numpy(values))


def read_cache(manager: KvCacheManager, cache: KvCache) -> np.ndarray:
    """Return the bytes of a cache: [num_tensors, slots, slot_bytes]."""
    views = [byte_view(manager, cache, index) for index in range(cache.cache_desc.num_tensors)]
    return torch.stack(views).numpy(force=True).copy()


def write_new_cache(manager: KvCacheManager, desc: CacheDesc, keys: Any = (), *, seed: int) -> KvCache:
    """Allocate a cache and fill it with `pattern`."""
    cache = manager.allocate_cache(desc, keys)
    write_cache(manager, cache, seed)
    return cache


def write_new_blocks(manager: KvCacheManager, desc: CacheDesc, key: Any = None, *, seed: int) -> KvCache:
    """Allocate a blocks cache and fill it with `pattern`."""
    cache = manager.allocate_blocks_cache(desc, key)
    write_cache(manager, cache, seed)
    return cache


owned: dict[int, list[np.ndarray]] = {}
"""Memory of this process that is registered, by the address of the first tensor."""


def register_new(manager: KvCacheManager, desc: CacheDesc, *given: Any, seed: int, is_blocks=True) -> KvCache:
    """Register memory of this process that is filled with `pattern`."""
    arrays = [np.ascontiguousarray(one) for one in pattern(desc, seed)]
    addresses = [one.ctypes.data for one in arrays]
    owned[addresses[0]] = arrays
    register = manager.register_blocks_cache if is_blocks else manager.register_cache
    return register(desc, addresses, *given)


def owned_bytes(cache: KvCache) -> np.ndarray:
    """Return what is in the memory of a cache that `register_new` made: [num_tensors, slots, slot_bytes]."""
    return np.stack(owned[cache.tensor_addrs[0]])


def fits(manager: KvCacheManager, num_bytes: int) -> bool:
    try:
        cache = manager.allocate_cache(CacheDesc(1, [1, num_bytes], DataType.DT_UINT8))
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY:
            raise
        return False
    manager.deallocate_cache(cache)
    return True


def num_free_bytes(manager: KvCacheManager, pool: int = POOL) -> int:
    """Return how many bytes of a pool are free, which only allocations show."""
    low, high = 0, pool  # the answer lies in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(manager, middle) else (low, middle - 1)
    return low


class Layers(LayerSynchronizer):
    """Remembers which layers it is asked for, and acts as it is told for one of them."""

    def __init__(self, special: int = -1, act: Any = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.special, self.act = special, act

    def synchronize_layer(self, layer_index, timeout_in_millis, /):  # called by position
        self.asked.append((layer_index, timeout_in_millis))
        return self.act() if layer_index == self.special else True


class Runner(ModelRunner):
    """Remembers what it is given, and fills its cache with the pattern of the seed that is its input.

    Args:
        gate: port of this machine to connect to in each run, which then goes on when the connection closes.
    """

    def __init__(self, owner: LLMDataDist, *, gate: int | None = None) -> None:
        self.owner, self.gate = owner, gate
        self.seen: list[np.ndarray] = []  # the cache's bytes before each run
        self.allocated: list[KvCache] = []
        self.deallocated: list[KvCache] = []

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self.allocated.append(kv_cache)

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        self.deallocated.append(kv_cache)

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        self.seen.append(read_cache(self.owner.kv_cache_manager, kv_cache))
        if input_tensors is not None:
            write_cache(self.owner.kv_cache_manager, kv_cache, input_tensors)
        if self.gate is not None:
            with socket.create_connection(("127.0.0.1", self.gate)) as connection:
                connection.recv(1)
        if "error" in kwargs:
            raise ValueError(kwargs["error"])
        return kwargs.get("answer")


def add_model(owner: LLMDataDist, options: dict[str, str], *, gate: int | None = None) -> LLMModel:
    return owner.add_model(options, Runner(owner, gate=gate))


def check_default_runner(model_options: dict[str, str]) -> None:
    """Add models that ask a factory for their runner; the factory stays for good."""
    given = []

    class Doubling(ModelRunner):
        def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
            return [2 * tensor.numpy() for tensor in input_tensors]

    def make(options: dict[str, str]) -> ModelRunner:
        given.append(dict(options))
        return Doubling()

    set_default_runner_factory(make)
    prompt = start_prompt()
    try:
        model = prompt.add_model(model_options)
        assert given == [model_options]
        (doubled,) = model.predict(LLMReq(), [Tensor(np.arange(3))])
        assert doubled.tolist() == [0, 2, 4]
        for inputs in (np.arange(3), None, [1], (Tensor(np.arange(3)), 1)):
            try:
                model.predict(LLMReq(), inputs)
            except TypeError:
                continue
            raise AssertionError(f"{inputs} were accepted")
        assert prompt.add_model(model_options, Runner(prompt)).predict(LLMReq(), 5, answer=6) == 6
    finally:
        prompt.finalize()


# -- inside of a side: each private name is written once -----------------------------------------------------


def session_of(side: LLMDataDist) -> Any:
    """Return what an initialised object consists of."""
    return side._session


def pool_of(side: LLMDataDist) -> Any:
    return session_of(side)._pool


def caches_of(pool: Any) -> list[Any]:
    return list(pool._caches.values())


def num_transfers(pool: Any) -> int:
    """Return how many transfers hold caches of a pool."""
    return sum(cache.num_transfers for cache in caches_of(pool))


def link_of(decoder: LLMDataDist, cluster_id: int = 1) -> Any:
    return session_of(decoder).links.link_of(cluster_id)


def use_of(link: Any) -> contextlib.AbstractContextManager[Any]:
    """Return what whoever uses a link of a DECODER holds."""
    return link._busy


def transports_of(side: LLMDataDist) -> dict[int, str]:
    """Return the transport of each link of a side, by the cluster id of the other."""
    session = session_of(side)
    return (session.links if session.service is None else session.service).transports


def threads_of(prompt: LLMDataDist) -> list[threading.Thread]:
    """Return the threads that serve the links of a PROMPT."""
    return list(session_of(prompt).service._threads)


def links_to_decoders(service: Any) -> list[Any]:
    """Return the links of a PROMPT's service."""
    return list(service._links.values())


def connection_of(end: Any, number: int = 0) -> socket.socket:
    """Return a connection of an end of a data plane."""
    return end._connections[number]


def num_mapped(destination: Any) -> int:
    """Return how many files of the source an end over shared memory has mapped."""
    return len(destination._mapped)
