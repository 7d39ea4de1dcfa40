"""Pairs of a PROMPT and a DECODER, in one process and in two, over each transport."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import sides
from forwarder import Forwarder
from remote_objects import RemoteProcess, remote_process

from quire.datadist import KvCacheManager, LLMClusterInfo, LLMDataDist, LLMStatusCode
from quire.datadist.transports import nixl_agent

PROCESSES = ("one-process", "two-processes")
TRANSPORTS = ("tcp", "shared_memory", *(["nixl"] if nixl_agent.is_installed() else []))
PAIRS = [f"{processes} {transport}" for processes in PROCESSES for transport in TRANSPORTS]
CROSSED_PAIRS = [kind for kind in PAIRS if kind not in {"one-process shared_memory", "two-processes tcp"}]
"""Each way to share processes and each transport once: for what is shown of pulls with every combination."""

LIMIT = 600.0  # seconds that all tests of a module may take


def with_pairs(*wanted: str) -> pytest.MarkDecorator:
    """Run a test with the pairs only whose kind is all of this."""
    kinds = [kind for kind in PAIRS if set(wanted) <= set(kind.split())]
    return pytest.mark.parametrize("make_pair", kinds, indirect=True)


in_two_processes = with_pairs("two-processes")  # the PROMPT has a process of its own
in_two_processes_over_tcp = with_pairs("two-processes", "tcp")
over_tcp = with_pairs("tcp")  # a forwarder lies between the PROMPT and the data
over_shared_memory = with_pairs("shared_memory")


@dataclasses.dataclass
class Pair:
    """A linked PROMPT and DECODER, with their managers.

    Attributes:
        call: runs a function of an importable module where the PROMPT is.
        peer: what the DECODER links to.
        forwarder: lies between the two if the test asked for one.
        process: where the PROMPT is, if that is another process.
        transport: that both use.
    """

    prompt: LLMDataDist
    decoder: LLMDataDist
    pm: KvCacheManager
    dm: KvCacheManager
    call: Callable[..., Any]
    peer: LLMClusterInfo
    forwarder: Forwarder | None
    process: RemoteProcess | None
    transport: str

    @property
    def itself(self) -> LLMClusterInfo:
        """Return what the PROMPT knows the DECODER by."""
        return sides.cluster_info(self.decoder.cluster_id, 0)

    def link(self, timeout: int = sides.PATIENT) -> None:
        result = self.decoder.link_clusters([self.peer], timeout)
        assert result == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])

    def unlink(self, timeout: int = sides.PATIENT, **keywords: Any) -> LLMStatusCode:
        overall, codes = self.decoder.unlink_clusters([self.peer], timeout, **keywords)
        assert codes == [overall]
        return overall


class PromptProcess:
    """The process of the PROMPTs of several tests: a new one after a test that killed it or failed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._process: RemoteProcess | None = None

    def running(self) -> RemoteProcess:
        if self._process is not None and self._process.is_killed:
            self.end()
        if self._process is None:
            self._process = self._stack.enter_context(remote_process(limit=LIMIT))
        return self._process

    def end(self) -> None:
        self._process = None
        self._stack.close()


class PairMaker:
    """Makes pairs, and finalizes them when the test ends."""

    def __init__(self, kind: str, prompt_process: PromptProcess, stack: contextlib.ExitStack) -> None:
        processes, self._transport = kind.split()
        self._prompt_process = prompt_process if processes == "two-processes" else None
        self._stack = stack

    def __call__(
        self,
        *,
        prompt_id: int = 1,
        decoder_id: int = 2,
        pool: int = sides.POOL,
        timeout: int = sides.PATIENT,
        forwarded: bool = False,
        linked: bool = True,
    ) -> Pair:
        """Make a pair; `timeout` (milliseconds) is that of calls to the DECODER's manager."""
        if forwarded and self._transport == "nixl":
            pytest.skip("NIXL's data do not pass the forwarder")
        process = self._prompt_process.running() if self._prompt_process else None
        call = process.call if process else lambda function, *given, **named: function(*given, **named)
        shared: dict[str, Any] = {"pool": pool, "transport": self._transport}
        prompt = call(sides.start_prompt, prompt_id, **shared)
        decoder = sides.start_decoder(decoder_id, timeout=timeout, **shared)
        self._stack.callback(_finalize_if_there, prompt)
        self._stack.callback(decoder.finalize)
        forwarder = Forwarder(prompt.listen_port) if forwarded else None
        if forwarder:
            self._stack.callback(forwarder.close)
        peer = sides.cluster_info(prompt_id, forwarder.port if forwarder else prompt.listen_port)
        managers = prompt.kv_cache_manager, decoder.kv_cache_manager
        pair = Pair(prompt, decoder, *managers, call, peer, forwarder, process, self._transport)
        if linked:
            pair.link()
        return pair


def _finalize_if_there(prompt: LLMDataDist) -> None:
    with contextlib.suppress(EOFError):  # the test has killed its process
        prompt.finalize()
