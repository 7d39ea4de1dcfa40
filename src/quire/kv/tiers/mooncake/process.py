"""The process in which Mooncake's client runs: what hangs or crashes there does not harm the engine.

    python -m quire.kv.tiers.mooncake.process MEMORY BYTES_PER_LANE SETUP LANE...

MEMORY and LANE are file descriptors: shared memory with a part for each lane, and sockets on which calls come
in, one at a time. SETUP is JSON for `MooncakeDistributedStore.setup`, which holds the interpreter's lock
until it succeeds or gives up after a minute. Then the first lane carries an empty answer, or the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

MAX_SETUP_TIME = 20
"""Seconds after which a process that has not joined the store ends, also if the engine is gone."""

MAX_LEAVING_TIME = 10
"""Seconds after which a process that cannot leave the store ends."""


def main() -> None:
    """Serve until all lanes are closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine closes the lanes
    signal.alarm(MAX_SETUP_TIME)
    memory_fd, bytes_per_lane, setup, *descriptors = sys.argv[1:]
    lanes = [Connection(int(descriptor)) for descriptor in descriptors]
    memory = mmap.mmap(int(memory_fd), 0)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        store = _join(json.loads(setup), start, len(memory))
    except Exception as error:
        lanes[0].send_bytes(_encode_error(error))
        return
    lanes[0].send_bytes(msgspec.msgpack.encode([]))
    signal.alarm(0)
    threads = []
    for index, lane in enumerate(lanes):
        address = start + index * int(bytes_per_lane)
        threads.append(threading.Thread(target=_serve, args=(store, lane, address), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    signal.alarm(MAX_LEAVING_TIME)
    store.unregister_buffer(start)
    store.close()
    os._exit(0)  # without waiting for Mooncake's threads


def _join(setup: dict[str, Any], address: int, num_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    for operation, code in (
        ("setup", store.setup(setup)),
        ("register_buffer", store.register_buffer(address, num_bytes)),
    ):
        if code:
            raise OSError(f"{operation} failed with {code}")
    return store


def _encode_error(error: Exception) -> bytes:
    return msgspec.msgpack.encode(f"{type(error).__name__}: {error}")


def _serve(store: Any, lane: Connection, address: int) -> None:
    with contextlib.suppress(EOFError, OSError):  # the engine has closed the lane, or has ended
        while True:
            operation, names, num_bytes = msgspec.msgpack.decode(lane.recv_bytes())
            try:
                numbers = [int(number) for number in _call(store, operation, names, address, num_bytes)]
                answer = msgspec.msgpack.encode(numbers)
            except Exception as error:
                answer = _encode_error(error)
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
