"""Whether there is memory enough for one more request: one method to write, `AdmissionPolicy.admits`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from quire.config import SchedulerConfig
from quire.request import Request
from quire.status import RequestStatus
from quire.step import IntArray

PAST_OUTPUTS = 1000  # whose lengths count
GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclasses.dataclass(slots=True)
class Candidate:
    """The request that is to be admitted next."""

    num_tokens: int  # known now; with cache eviction, here and below, only those that it can hold at once
    token_limit: int  # most tokens that it can reach
    num_cached_blocks: int  # at its start, found in the prefix cache
    num_chunk_blocks: int  # that its first chunk needs, the cached ones included
    num_output_tokens: int = 0  # above 0 if it was preempted


class RunningMemory(NamedTuple):
    """What the running requests need and hold, those admitted in this step included: [R] each."""

    num_tokens: IntArray  # known now
    num_output_tokens: IntArray  # of those
    token_limit: IntArray  # most tokens that it can reach
    num_blocks: IntArray  # held


class MemoryView:
    """The KV cache as admission sees it in one step.

    Args:
        block_size: tokens per block.
        num_blocks: blocks in the cache.
        num_free: free blocks, the candidate's cached ones not counted; to be set for each candidate.
        num_reserved_for_loads: blocks that requests whose KV is on its way will need besides it.
        read_running: returns the running requests; asked at most once, and only if a policy wants to know.
    """

    __slots__ = ("_admitted", "_read_running", "_reserved", "_reserved_for_admitted", "_running",
                 "block_size", "num_blocks", "num_free", "num_reserved_for_loads")  # fmt: skip

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_free: int,
        num_reserved_for_loads: int = 0,
        read_running: Callable[[], RunningMemory],
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_free = num_free
        self.num_reserved_for_loads = num_reserved_for_loads
        self._read_running = read_running
        self._running: RunningMemory | None = None
        self._admitted: list[Candidate] = []  # in this step, and not in `_running` yet
        self._reserved: int | None = None  # for `_running`
        self._reserved_for_admitted = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def add(self, candidate: Candidate) -> None:
        """Add an admitted candidate to the running requests."""
        self._admitted.append(candidate)
        to_come = -(-candidate.num_tokens // self.block_size) - candidate.num_chunk_blocks
        if to_come > 0:
            self._reserved_for_admitted += to_come

    @property
    def reserved_blocks(self) -> int:
        """Blocks that requests in the middle of their prompt, or whose KV is being loaded, still need."""
        if self._reserved is None:
            running = self.running
            wanted = -(-running.num_tokens // self.block_size)
            self._reserved = int(np.maximum(wanted - running.num_blocks, 0).sum())
        return self._reserved + self._reserved_for_admitted + self.num_reserved_for_loads

    @property
    def running(self) -> RunningMemory:
        """The running requests, those admitted in this step at the end."""
        if self._running is None:
            self._running = self._read_running()
        if self._admitted:
            self._running = _appended(self._running, self._admitted)
            self._admitted = []
            self._reserved = None
            self._reserved_for_admitted = 0
        return self._running

    def running_with(self, candidate: Candidate) -> RunningMemory:
        """Return the running requests and, at the end, the candidate, as if it were admitted."""
        return _appended(self.running, [candidate])


def _appended(running: RunningMemory, candidates: list[Candidate]) -> RunningMemory:
    rows = [
        (one.num_tokens, one.num_output_tokens, one.token_limit, one.num_chunk_blocks) for one in candidates
    ]
    columns = np.array(rows, dtype=np.int32).T
    return RunningMemory(*(np.concatenate(pair) for pair in zip(running, columns, strict=True)))


class AdmissionPolicy(ABC):
    """Decides whether the next request in order may start. An idle engine admits it without asking.

    Args:
        config: of the scheduler.
    """

    def __init__(self, *, config: SchedulerConfig) -> None:
        self.config = config

    @abstractmethod
    def admits(self, candidate: Candidate, memory: MemoryView) -> bool:
        """Return whether the candidate may start now; if not, it and all behind it wait.

        Args:
            candidate: its fields with `tokens` in their name, and `token_limit`, count tokens; those with
                `blocks` count KV blocks of `memory.block_size` tokens.
            memory: the KV cache; `num_free` and `num_blocks` count blocks.
        """

    def left(self, request: Request) -> None:  # noqa: B027, a policy that learns nothing needs none
        """Called when a request has left its slot: its status says why, its output is up to date."""


class Reserve(AdmissionPolicy):
    """The candidate's blocks must be free, and some to spare.

    Its blocks are those of its whole prompt with `SchedulerConfig.reserve_full_prompt`, else those of its
    first chunk. To spare are a share `SchedulerConfig.watermark` of all blocks, so that running requests can
    grow for a while before anyone is preempted, and what earlier prompts were promised.
    """

    @override
    def admits(self, candidate: Candidate, memory: MemoryView) -> bool:
        needed, withheld = candidate.num_chunk_blocks, int(self.config.watermark * memory.num_blocks)
        if self.config.reserve_full_prompt:
            needed = memory.blocks_for(candidate.num_tokens)
            withheld += memory.reserved_blocks
        return needed - candidate.num_cached_blocks <= memory.num_free - withheld


class PastFuture(AdmissionPolicy):
    """The predicted peak of all running requests' memory must fit, a share `watermark` of it left free.

    After Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees": the length that each
    running request will have is predicted from the lengths that past ones had (`OutputLengths`). Memory only
    shrinks when a request ends, so the peak is at one of those moments. Where outputs are mostly
    far shorter than `max_tokens`, that admits more than reserving the limit would, and preempts less than
    `Reserve`.
    """

    def __init__(self, *, config: SchedulerConfig) -> None:
        super().__init__(config=config)
        self._lengths = OutputLengths()

    @override
    def left(self, request: Request) -> None:
        self._lengths.learn(request)

    @override
    def admits(self, candidate: Candidate, memory: MemoryView) -> bool:
        if candidate.num_chunk_blocks - candidate.num_cached_blocks > memory.num_free:
            return False
        running = memory.running_with(candidate)
        num_held = int(running.num_blocks.sum()) - candidate.num_chunk_blocks + candidate.num_cached_blocks
        num_in_use = memory.num_blocks - memory.num_free
        peak = peak_blocks(
            running,
            self._lengths.remaining(running.num_output_tokens, running.token_limit - running.num_tokens),
            block_size=memory.block_size,
            num_shared=num_held - num_in_use,
        )
        withheld = int(self.config.watermark * memory.num_blocks) + memory.num_reserved_for_loads
        return peak <= memory.num_blocks - withheld


def peak_blocks(
    running: RunningMemory, num_remaining: IntArray, *, block_size: int, num_shared: int
) -> float:
    """Return the most blocks that will be in use at once, if each request gets its remaining tokens.

    Args:
        running: R requests.
        num_remaining: tokens that each is still to get, [R].
        block_size: tokens per block.
        num_shared: how many more blocks the requests hold by their own count than are in use: a block with
            two holders counts twice. Taken to end in step with the requests. Below 0: held by others.
    """
    order = np.argsort(-num_remaining, kind="stable")  # the last to end first
    remaining = num_remaining[order]
    alive = np.arange(1, len(order) + 1)
    # Of request i's last block, at most block_size - 1 places are empty.
    num_now = np.cumsum(running.num_tokens[order], dtype=np.int64)
    num_then = num_now + alive * (remaining + block_size - 1)
    share = num_now / num_now[-1] if num_shared > 0 else 1.0
    blocks = num_then // block_size - num_shared * share
    return float(blocks.max())


class OutputLengths:
    """The last `PAST_OUTPUTS` output lengths of requests that came to their own end, in tokens."""

    def __init__(self) -> None:
        self._past: deque[int] = deque(maxlen=PAST_OUTPUTS)
        self._sorted: IntArray | None = np.empty(0, dtype=np.int32)

    def learn(self, request: Request) -> None:
        """Record the output length of a request that ended; preemptions and aborts do not count."""
        if request.status in {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}:
            self._past.append(len(request.output_token_ids))
            self._sorted = None

    def remaining(self, num_output: IntArray, most: IntArray) -> IntArray:
        """Predict how many tokens each request will still get, [R], from 0 to `most` ([R]).

        A request that has n output tokens gets a length from the past outputs longer than n, or its limit,
        which counts as one more past output: without any history, all get their limits. The paper draws at
        random; here the requests are spread evenly over the distribution, so that a run can be repeated.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._past, dtype=np.int32, count=len(self._past)))
        past = self._sorted
        first_longer = np.searchsorted(past, num_output, side="right")
        quantile = (np.arange(1, len(num_output) + 1) * GOLDEN_RATIO) % 1.0
        index = first_longer + (quantile * (len(past) - first_longer + 1)).astype(np.int64)
        predicted = np.append(past, np.int32(np.iinfo(np.int32).max))[index]
        remaining: IntArray = np.minimum(predicted - num_output, most).astype(np.int32)
        return remaining
