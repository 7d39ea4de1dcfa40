"""Bounds on requests held in the front while the engine is paused, busy or restarting."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.errors import QueueFullError
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.output_processor import OutputProcessor

START_TIME = 5.0
"""Approximate seconds until a new engine is ready; refused requests may retry after that."""


class HeldRequests:
    """Requests waiting for an engine, bounded like the scheduler's queue.

    Args:
        outputs: the live requests.
        config: the bounds.

    Attributes:
        is_paused: whether new requests are held although an engine runs the others.
    """

    def __init__(self, outputs: OutputProcessor, config: SchedulerConfig) -> None:
        self.is_paused = False
        self._outputs = outputs
        self._config = config
        self._held: dict[str, ProcessedRequest] = {}
        self._num_sequences = 0
        self._num_tokens = 0

    def hold(self, processed: ProcessedRequest) -> None:
        """Hold a request until there is an engine."""
        self._held[processed.request_id] = processed
        self._num_sequences += _num_sequences(processed)
        self._num_tokens += _num_tokens(processed)

    def forget(self, processed: ProcessedRequest) -> None:
        """Stop holding a request; has no effect if it is not held."""
        if self._held.get(processed.request_id) is processed:
            del self._held[processed.request_id]
            self._num_sequences -= _num_sequences(processed)
            self._num_tokens -= _num_tokens(processed)

    def release(self) -> None:
        """Forget all held requests: the engine has them now, and applies its own bounds."""
        self._held.clear()
        self._num_sequences = self._num_tokens = 0

    def refusal(self, processed: ProcessedRequest, *, has_engine: bool) -> QueueFullError | None:
        """Return why there is no room for one more request; None if there is.

        A request that can never fit is left to the engine, which has a better message.
        """
        config, num_new = self._config, len(processed.core_request.queued_sequence_ids)
        if num_new > config.max_num_queued_reqs:
            return None
        if not has_engine:
            return self._refusal_of_held(processed)
        limit = config.max_num_seqs + config.max_num_queued_reqs  # the engine would refuse more, too
        if self._outputs.num_sequences + num_new <= limit:
            return None
        num_live = self._outputs.num_queued_sequences
        if num_live + num_new <= limit:
            return None
        return QueueFullError(
            f"{num_live} sequences are unfinished and the request has {num_new}; at most max_num_seqs "
            f"{config.max_num_seqs} can run and max_num_queued_reqs {config.max_num_queued_reqs} wait"
        )

    def _refusal_of_held(self, processed: ProcessedRequest) -> QueueFullError | None:
        config = self._config
        num_sequences = self._num_sequences + _num_sequences(processed)
        num_tokens = self._num_tokens + _num_tokens(processed)
        if num_sequences > config.max_num_queued_reqs:
            bound = f"at most max_num_queued_reqs {config.max_num_queued_reqs} sequences"
        elif self._held and num_tokens > config.max_num_queued_tokens:  # there is always room for one
            bound = f"at most max_num_queued_tokens {config.max_num_queued_tokens} tokens"
        else:
            return None
        return QueueFullError(
            f"the engine is being restarted, or is paused; with this request, {num_sequences} sequences "
            f"of {num_tokens} tokens would wait for it, and {bound} can",
            retry_after=START_TIME,
        )


def _num_sequences(processed: ProcessedRequest) -> int:
    return len(processed.core_request.queued_sequence_ids)


def _num_tokens(processed: ProcessedRequest) -> int:
    return _num_sequences(processed) * len(processed.core_request.prompt_token_ids)
