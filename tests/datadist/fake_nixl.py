"""A stand-in for NIXL in one process: agents with the methods that the transport uses, and faults in them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

METHODS = (
    "register_memory",
    "deregister_memory",
    "get_reg_descs",
    "get_partial_agent_metadata",
    "add_remote_agent",
    "remove_remote_agent",
    "prep_xfer_dlist",
    "make_prepped_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
    "release_dlist_handle",
    "get_new_notifs",
)


class Core:
    """What lives as long as an agent does: while it does, what it was asked to read may arrive."""


class FakeNixl:
    """Opens agents that know one another.

    Attributes:
        agents: by name, those that have not ended.
        faults: what is done instead, by method.
        is_slow: reads begin with "PROC", and end when they are asked for.
    """

    def __init__(self) -> None:
        self.agents: weakref.WeakValueDictionary[str, FakeAgent] = weakref.WeakValueDictionary()
        self.faults: dict[str, Any] = {}
        self.is_slow = False
        self.released = threading.Event()
        self.hangs = threading.Event()
        self.numbers = itertools.count(1)

    def open_agent(self, name: str) -> FakeAgent:
        if "open_agent" in self.faults:
            self.faults["open_agent"]()
        return FakeAgent(name, self)

    def hang(self, *_: Any) -> None:
        self.hangs.set()
        self.released.wait()

    @contextlib.contextmanager
    def fault(self, method: str, act: Any) -> Iterator[None]:
        self.faults[method] = act
        try:
            yield
        finally:
            del self.faults[method]

    @property
    def num_regions(self) -> int:
        return sum(len(agent.regions) for agent in list(self.agents.values()))


class FakeAgent:
    def __init__(self, name: str, nixl: FakeNixl) -> None:
        self.name, self.nixl, self.agent = name, nixl, Core()
        self.regions: dict[int, np.ndarray] = {}
        self.known: dict[str, dict[int, np.ndarray]] = {}
        self.handles: set[int] = set()
        nixl.agents[name] = self

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in METHODS:
            return method

        def call(*arguments: Any) -> Any:
            fault = self.nixl.faults.get(name)
            return method(*arguments) if fault is None else fault(*arguments)

        return call

    def register_memory(self, pieces, kind, backends):
        number = next(self.nixl.numbers)
        self.regions[number] = pieces
        return [number]

    def deregister_memory(self, registration, backends):
        del self.regions[registration[0]]

    def get_reg_descs(self, pieces, kind):
        return [0]

    def get_partial_agent_metadata(self, registration, has_connection, backends):
        pieces = {number: self.regions[number].tolist() for number in registration}
        return json.dumps([self.name, has_connection, pieces]).encode()

    def add_remote_agent(self, metadata):
        name, has_connection, pieces = json.loads(metadata)
        if not has_connection and name not in self.known:
            raise KeyError("no connection")
        regions = {int(number): np.array(rows, dtype=np.uint64) for number, rows in pieces.items()}
        self.known.setdefault(name, {}).update(regions)
        return name

    def remove_remote_agent(self, name):
        del self.known[name]

    def prep_xfer_dlist(self, name, pieces, kind, backends):
        regions = self.regions if name == "NIXL_INIT_AGENT" else self.known[name]
        known = [row for region in regions.values() for row in region.tolist()]
        for address, length, _ in pieces.tolist():
            assert any(first <= address and address + length <= first + size for first, size, _ in known)
        return self._handle(pieces)

    def make_prepped_xfer(self, operation, local, local_indices, remote, remote_indices, message, backends):
        assert operation == "READ"
        return self._handle((local[1][local_indices], remote[1][remote_indices]))

    def transfer(self, handle):
        return "PROC" if self.nixl.is_slow else self.check_xfer_state(handle)

    def check_xfer_state(self, handle):
        for to, source in zip(*handle[1], strict=True):
            assert to[1] == source[1]
            ctypes.memmove(int(to[0]), int(source[0]), int(to[1]))
        return "DONE"

    def release_xfer_handle(self, handle):
        self.handles.remove(handle[0])

    def release_dlist_handle(self, handle):
        self.handles.remove(handle[0])

    def get_new_notifs(self, backends):
        return {}

    def _handle(self, content):
        number = next(self.nixl.numbers)
        self.handles.add(number)
        return number, content
