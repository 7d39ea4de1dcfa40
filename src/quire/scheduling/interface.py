"""What an engine needs of a scheduler. Plug another in with `EngineConfig.scheduler_cls`."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable

from quire.config import SchedulerConfig
from quire.request import Request, RequestStatus
from quire.scheduling.outputs import EngineCoreOutputs, SchedulerStats
from quire.step import ModelRunnerOutput, SchedulerOutput


class PauseState(enum.Enum):
    """Which requests may run."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()  # running requests go on, nothing is admitted
    PAUSED_ALL = enum.auto()  # nothing runs


class SchedulerInterface(ABC):
    """Decides, step by step, how many tokens of which requests the model computes.

    Args:
        config: validated.
        num_blocks: KV blocks in the cache.
        max_model_len: longest sequence in tokens.
    """

    @abstractmethod
    def __init__(self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int) -> None: ...

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step, which is one forward pass.

        Each request may get all of its prompt tokens, one token, or anything between: chunked prefill,
        prefix hits and decoding are the same rule. With `throttle_prefills`, only decoding goes on.
        """

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Apply a step's tokens, end the requests that are done, and return outputs by client index."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DuplicateRequestError: its id is in use.
            InvalidRequestError: it can never be served; the message says why and what would help.
            QueueFullError: a bound of the queue is reached.
        """

    @abstractmethod
    def has_request(self, request_id: str) -> bool:
        """Whether a request with this id waits or runs."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside: a client's abort, or a stop string that the front end found.

        Unknown ids are ignored, None means all. Returns the requests that ended. Their blocks are free when
        this returns, or as soon as the step in flight has been applied.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether finished requests are still to be told to the runner by the next `schedule()`."""

    def has_requests(self) -> bool:
        """Whether `schedule()` has anything to say: unfinished requests, or finished ones to clear."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting)."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, as is needed when weights change.

        Running requests are preempted and recomputed if `reset_running_requests`; otherwise nothing happens
        and False is returned while any block is in use.
        """

    @property
    @abstractmethod
    def pause_state(self) -> PauseState:
        """Which requests may run."""

    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Say which requests may run."""

    @abstractmethod
    def get_kv_cache_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats:
        """Return the present state and the counters since the start."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything; the scheduler is not used afterwards."""
