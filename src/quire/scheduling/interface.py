"""What an engine needs of a scheduler. Plug another in with `EngineConfig.scheduler_cls`."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from quire.config import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.kv.connectors.interface import KVConnector
from quire.request import Request
from quire.scheduling.context import SchedulerContext
from quire.scheduling.outputs import EngineCoreOutputs, SchedulerStats
from quire.status import RequestStatus
from quire.step import DraftTokenIds, GrammarOutput, IntArray, ModelRunnerOutput, SchedulerOutput


class PauseState(enum.Enum):
    """Which requests may run."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()  # running requests go on, nothing is admitted or loaded
    PAUSED_ALL = enum.auto()  # nothing runs


class StepWithdrawnError(Exception):
    """A planned step cannot be computed and was taken back: its requests are in the queue again."""


class SchedulerInterface(ABC):
    """Decides, step by step, how many tokens of which requests the model computes.

    Abstract is what both vLLM's and eSurge's interface of this name ask for; the rest has defaults, which say
    that a scheduler has no such thing.

    Args:
        config: validated.
        num_blocks: KV blocks in the cache.
        max_model_len: longest sequence in tokens.
        context: the scheduler's surroundings; None: none of its parts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        context: SchedulerContext | None = None,
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.context = context or SchedulerContext()

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step: one forward pass.

        Each request may get all of its prompt tokens, one token, or anything between: chunked prefill,
        prefix hits and decoding are the same rule. With `throttle_prefills`, only decoding goes on.

        Raises:
            StepWithdrawnError: the step could not be planned to its end, and nothing is lost; try again.
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

    def has_request(self, request_id: str) -> bool:
        """Whether a request with this id waits or runs; by default, whether any request does."""
        return self.has_unfinished_requests()

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> Sequence[Request] | None:
        """End requests from outside: a client's abort, or a stop string that the front end found.

        Unknown ids are ignored; None means all requests. Returns the requests that ended; None, as vLLM's
        and eSurge's schedulers do, if all of those asked for have. Their blocks are free when this returns,
        or as soon as the step in flight has been applied.

        Raises:
            ValueError: `finished_status` is not terminal.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether requests have ended that the next step must report to the runner or to a client."""

    def has_requests(self) -> bool:
        """Whether `schedule()` has anything to do: unfinished requests, or finished ones to report."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def next_due(self) -> float | None:
        """Return when `schedule()` has something to do although there are no requests, such as to end a pin.

        Seconds, by the clock of the context; None: at no time.
        """
        return None

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting)."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes, as is needed when weights change.

        Running requests are preempted and recomputed if `reset_running_requests`; otherwise nothing happens
        and False is returned while any block is in use. Nothing happens either as long as a peer reads blocks
        of a request that has ended: they are promised to it as they are. With `reset_connector`, what the KV
        connector has stored is forgotten too; if it cannot be, nothing happens and False is returned.
        """

    def reset_encoder_cache(self) -> None:  # noqa: B027, no model that Quire runs has an encoder
        """Forget all outputs of encoders; there are none by default."""

    @property
    def pause_state(self) -> PauseState:
        """Which requests may run."""
        return PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Say which requests may run.

        Raises:
            InvalidRequestError: the scheduler cannot be paused, as by default.
        """
        if pause_state is not PauseState.UNPAUSED:
            raise InvalidRequestError(
                f"{type(self).__name__} cannot be paused: it does not define set_pause_state()"
            )

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the tokens that grammars allow in this step, or None if no request of it has a grammar.

        The engine refuses structured outputs if the scheduler does not define this method.

        With `pending_structured_output_tokens`, it is asked once the steps before have been applied, while
        this one may be computed already; else it may be asked at once.
        """
        return None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:  # noqa: B027, drafts are offers
        """Take drafts for running requests, to be verified in the next step that schedules them.

        Requests that do not run are skipped; drafts that a grammar does not allow are cut off. By default
        all are.
        """

    def update_draft_token_ids_in_output(  # noqa: B027, only plans with drafts need it
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Replace the drafts in the newest plan, in place, before the runner gets it.

        A request keeps at most as many drafts as it was planned with; with fewer, it is scheduled for fewer
        tokens.

        Raises:
            ValueError: `scheduler_output` is not the newest step in flight.
        """

    def get_kv_connector(self) -> KVConnector | None:
        """Return the KV connector, if there is one that the scheduler uses."""
        return None

    def get_kv_event_publisher_config(self) -> object | None:
        """Return how the scheduler itself publishes KV events; None: it leaves that to the engine."""
        return None

    def oldest_waiting_request(self) -> str | None:
        """Return the waiting request that came first; None if none waits, or if that is not known."""
        return None

    def explain(self, request_id: str) -> str:
        """Return, in a sentence, what a request does or waits for."""
        return f"{type(self).__name__} does not say what a request does or waits for"

    def get_kv_cache_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1; 0 by default."""
        return 0.0

    @property
    def reads_priority(self) -> bool:
        """Whether the priorities of requests have an effect; if not, requests that have one are refused."""
        return True

    def next_blocks(self) -> IntArray:
        """Return the blank KV blocks that the next step may use, in order; none if that is not known."""
        return np.zeros(0, dtype=np.int32)

    def make_stats(self) -> SchedulerStats | None:
        """Return the present state and the counters since the start; None if none are kept."""
        return None

    def check_invariants(self) -> None:  # noqa: B027, a scheduler may keep no accounts that can be checked
        """Check that all accounts agree, which is slow.

        Raises:
            AssertionError: names what does not hold.
        """

    def shutdown(self) -> None:  # noqa: B027, a scheduler may hold nothing
        """Release everything; the scheduler is not used afterwards."""
