"""Machines that faults hit, what runs on them, and the calls that must all end in time."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import network_namespaces
import sides
from network_namespaces import Machine
from remote_objects import RemoteProcess, remote_process

from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, LLMException, LLMStatusCode

PORT = 26000
DEADLINE = 1.5  # seconds, of each pull
LINK_LIMIT = 2.0  # seconds, of each call that links
SLACK = 10.0  # seconds that a busy machine may need beyond a time limit
PROCESS_LIMIT = 24 * 3600.0

SUCCESS = "LLM_SUCCESS"
LATE = "LLM_WAIT_PROCESS_TIMEOUT"
KILLED = "killed"
GONE_PROCESS = (EOFError, BrokenPipeError)
"""What calls raise whose process has been killed."""


class ViolationError(AssertionError):
    """Something is not as docs/datadist.md promises."""


@dataclasses.dataclass
class Source:
    """What a PROMPT has for one pull: bytes of `sides.pattern(desc, seed)` under a key."""

    kind: str
    desc: CacheDesc
    seed: int
    handle: Any
    key: CacheKey | BlocksCacheKey

    @property
    def num_bytes(self) -> int:
        return self.desc.num_tensors * self.desc.tensor_bytes


class Host:
    """A machine and the process that runs on it."""

    def __init__(self, machine: Machine, stack: contextlib.ExitStack) -> None:
        self.machine = machine
        self._stack = stack.enter_context(contextlib.ExitStack())
        self.process = self._start()

    def restart(self) -> None:
        self._stack.close()
        self.process = self._start()

    def _start(self) -> RemoteProcess:
        process = self._stack.enter_context(remote_process(PROCESS_LIMIT))
        process.call(network_namespaces.enter, self.machine.namespace)
        return process


class Decoder:
    """A DECODER in a process on a machine, and its calls, which must all end in time."""

    def __init__(self, cluster_id: int, host: Host, settings: dict[str, Any], prompt_ip: str) -> None:
        self._process = host.process
        self._peer = sides.cluster_info(1, PORT, prompt_ip)
        timeout = int(DEADLINE * 1e3)
        self.side = self._process.call(sides.start_decoder, cluster_id, timeout=timeout, **settings)
        self._manager = self.side.kv_cache_manager
        self.last_duration = 0.0
        self.longest_overrun = 0.0
        self.num_right = 0
        self.last_error = ""

    def link(self, *, stopped: float = 0.0) -> str:
        limit = int(LINK_LIMIT * 1e3)
        call = lambda: self.side.link_clusters([self._peer], limit)[1][0]  # noqa: E731
        return self._timed(LINK_LIMIT + stopped, call)

    def unlink(self) -> str:
        limit = int(LINK_LIMIT * 1e3)
        return self._timed(LINK_LIMIT, lambda: self.side.unlink_clusters([self._peer], limit)[1][0])

    def pull(self, source: Source, *, stopped: float = 0.0) -> str:
        """Pull a source into a new cache; `stopped` are seconds that this process may be stopped."""
        try:
            return self._pull(source, stopped)
        except GONE_PROCESS:
            return KILLED

    def _pull(self, source: Source, stopped: float) -> str:
        is_blocks = isinstance(source.key, BlocksCacheKey)
        allocate = self._manager.allocate_blocks_cache if is_blocks else self._manager.allocate_cache
        target = allocate(source.desc)

        def pull() -> LLMStatusCode:
            if isinstance(source.key, BlocksCacheKey):
                blocks = list(range(source.desc.batch_size))
                self._manager.pull_blocks(source.key, target, blocks, blocks)
            else:
                self._manager.pull_cache(source.key, target)
            return LLMStatusCode.LLM_SUCCESS

        code = self._timed(DEADLINE + stopped, pull)
        if code == SUCCESS:
            self._require_right(source, target)
        self._manager.deallocate_cache(target)
        return code

    def _require_right(self, source: Source, target: Any) -> None:
        read = self._process.call(sides.read_cache, self._manager, target)
        if not (read == sides.pattern(source.desc, source.seed)).all():
            raise ViolationError("a pull that succeeded has brought other bytes")
        self.num_right += 1

    def _timed(self, limit: float, call: Callable[[], LLMStatusCode]) -> str:
        """Return the name of the code with which a call ended, which must be in time."""
        start = time.monotonic()
        try:
            code = call().name
        except LLMException as error:
            code = error.status_code.name
            self.last_error = str(error)
        except GONE_PROCESS:
            return KILLED
        self.last_duration = time.monotonic() - start
        overrun = self.last_duration - limit
        self.longest_overrun = max(self.longest_overrun, overrun)
        if overrun > SLACK:
            raise ViolationError(f"a call took {overrun:.2f} s more than its {limit:g} s, with {code}")
        return code
