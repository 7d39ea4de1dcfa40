"""The process in which Mooncake's client runs: what hangs or crashes there does not harm the engine.

    python -m quire.kv.tiers.mooncake.process MEMORY BYTES_PER_LANE SETUP LANE...

MEMORY and LANE are file descriptors: shared memory with a part for each lane, and sockets on which calls come
in, one at a time. SETUP is JSON for `MooncakeDistributedStore.setup`, which holds the interpreter's lock
until it succeeds or gives up after a minute. Once it has succeeded, the first lane carries an empty answer.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np


def main() -> None:
    """Serve until all lanes are closed."""
    from mooncake.store import MooncakeDistributedStore

    memory_fd, bytes_per_lane, setup, *lanes = sys.argv[1:]
    memory = np.frombuffer(mmap.mmap(int(memory_fd), 0), dtype=np.uint8)
    store = MooncakeDistributedStore()
    for code in (store.setup(json.loads(setup)), store.register_buffer(memory.ctypes.data, len(memory))):
        if code:
            raise SystemExit(f"the Mooncake store cannot be used: error {code}")
    threads = []
    for index, descriptor in enumerate(lanes):
        lane = Connection(int(descriptor))
        if not index:
            lane.send_bytes(msgspec.msgpack.encode([]))
        address = memory.ctypes.data + index * int(bytes_per_lane)
        threads.append(threading.Thread(target=_serve, args=(store, lane, address), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    store.unregister_buffer(memory.ctypes.data)
    store.close()
    os._exit(0)  # without waiting for Mooncake's threads


def _serve(store: Any, lane: Connection, address: int) -> None:
    while True:
        try:
            operation, names, num_bytes = msgspec.msgpack.decode(lane.recv_bytes())
        except EOFError:
            return
        try:
            numbers = [int(number) for number in _call(store, operation, names, address, num_bytes)]
            answer = msgspec.msgpack.encode(numbers)
        except Exception as error:
            answer = msgspec.msgpack.encode(f"{type(error).__name__}: {error}")
        lane.send_bytes(answer)


def _call(store: Any, operation: str, names: list[str], address: int, num_bytes: int) -> Any:
    match operation:
        case "exist":
            return store.batch_is_exist(names)
        case "put":
            return store.batch_put_from(names, [address], [num_bytes])
        case "get":
            return store.batch_get_into(names, [address], [num_bytes])
        case "remove":  # even while someone reads it
            return [store.remove(name, True) for name in names]
    raise ValueError(operation)


if __name__ == "__main__":
    main()
