"""What transfers of `quire.datadist` are compared with: the same bytes by plain sockets and by plain NIXL.

Nothing is checked, and nothing says when the source may change.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quire.datadist.transports import nixl_agent
from quire.datadist.transports.nixl_agent import BACKEND, open_agent

Read = Callable[[], None]

PROGRESS_INTERVAL = 1e-3


class SocketSource:
    """Sends equal shares of memory on several connections, each from a thread, whenever it is asked to."""

    def __init__(self, memory: torch.Tensor, num_streams: int) -> None:
        self._shares = np.array_split(memory.numpy(), num_streams)
        self._listener = socket.create_server(("127.0.0.1", 0))
        for share in self._shares:
            threading.Thread(target=self._serve, args=(share.data,), daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        address: tuple[str, int] = self._listener.getsockname()
        return address

    def _serve(self, share: memoryview) -> None:
        connection, _ = self._listener.accept()
        while connection.recv(1):
            connection.sendall(share)


def socket_read(address: tuple[str, int], memory: torch.Tensor, num_streams: int) -> Read:
    """Return what has all of a `SocketSource`'s memory sent into memory of the same size."""
    connections = [socket.create_connection(address) for _ in range(num_streams)]
    shares = np.array_split(memory.numpy(), num_streams)

    def receive(connection: socket.socket, share: memoryview) -> None:
        connection.send(b"x")
        while len(share):
            share = share[connection.recv_into(share, 0, socket.MSG_WAITALL) :]

    def read() -> None:
        jobs = zip(connections, (one.data for one in shares), strict=True)
        threads = [threading.Thread(target=receive, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return read


class NixlSource:
    """Lets memory be read through NIXL."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._agent = open_agent("benchmark-source")
        pieces = np.array([(one.data_ptr(), one.nbytes, 0) for one in tensors], dtype=np.uint64)
        self._agent.register_memory(pieces, "DRAM", [BACKEND])
        threading.Thread(target=self._progress, daemon=True).start()

    @property
    def address(self) -> tuple[bytes, list[int]]:
        """What `nixl_read` needs: the agent's metadata, and the address of each tensor."""
        return self._agent.get_agent_metadata(), [one.data_ptr() for one in self._tensors]

    def _progress(self) -> None:
        while True:
            self._agent.get_new_notifs([BACKEND])
            time.sleep(PROGRESS_INTERVAL)


class NixlReader:
    """Reads through NIXL into memory.

    Args:
        metadata: of the agent of a `NixlSource`.
        tensors: that are read into.
    """

    def __init__(self, metadata: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self._agent = open_agent("benchmark-target")
        self._name = self._agent.add_remote_agent(metadata)
        pieces = np.array([(one.data_ptr(), one.nbytes, 0) for one in tensors], dtype=np.uint64)
        self._agent.register_memory(pieces, "DRAM", [BACKEND])

    def read(self, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], piece_bytes: int) -> Read:
        """Return what reads pieces of equal size from addresses to addresses, in one transfer."""
        local, remote = self._described(target, piece_bytes), self._described(source, piece_bytes)

        def read() -> None:
            here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM", [BACKEND])
            there = self._agent.prep_xfer_dlist(self._name, remote, "DRAM", [BACKEND])
            indices = np.arange(len(source), dtype=np.int32)
            transfer = self._agent.make_prepped_xfer("READ", here, indices, there, indices, b"", [BACKEND])
            state = self._agent.transfer(transfer)
            while state == "PROC":
                state = self._agent.check_xfer_state(transfer)
            assert state == "DONE", state
            self._agent.release_xfer_handle(transfer)
            for handle in (here, there):
                self._agent.release_dlist_handle(handle)

        return read

    def _described(self, addresses: np.ndarray[Any, Any], piece_bytes: int) -> np.ndarray[Any, Any]:
        described = np.zeros((len(addresses), 3), dtype=np.uint64)
        described[:, 0], described[:, 1] = addresses, piece_bytes
        return described


def has_nixl() -> bool:
    """Return whether NIXL can be imported."""
    return nixl_agent.is_installed()
