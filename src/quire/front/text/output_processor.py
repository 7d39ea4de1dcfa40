"""Output processing: text, stop strings, log-probabilities, and ranking of completions.

The table of live requests keeps each one's prompt, parameters and tokens, as needed to continue it on another
engine.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire.dialogue.reasoning.text import ReasoningText
from quire.engine.messages import ErrorInfo
from quire.errors import DuplicateRequestError, QuireError
from quire.front.text.detokenizer import DecoderFactory
from quire.front.text.input_processor import ProcessedRequest
from quire.front.text.stop_strings import StoppableText, StopStrings
from quire.request_output import (
    CompletionOutput,
    ListView,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason
from quire.step import PositionLogprobs

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CompletionState:
    """One completion and its output so far."""

    def __init__(self, index: int, sequence_id: str, text: StoppableText, params: SamplingParams) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.pooled: bytes | None = None
        self._error: ErrorInfo | None = None
        self._text = text
        self._sums_logprobs = params.logprobs is not None or params.num_sequences > params.n
        self._sum_of_logprobs = 0.0
        self._logprob_of_beam: float | None = None
        self._min_tokens = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output

    @property
    def text(self) -> str:
        """Text so far, without text withheld for stop strings."""
        return self._text.text

    @property
    def error(self) -> str | None:
        """The error message, if the completion ended with an error."""
        return None if self._error is None else self._error.message

    @property
    def exception(self) -> QuireError | None:
        """The error as an exception of `quire.errors`; None if it is not one of these."""
        return self._error.to_exception() if self._error is not None and self._error.kind else None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities in nats; None if unknown."""
        return self._sum_of_logprobs if self._sums_logprobs else self._logprob_of_beam

    def apply(self, output: EngineCoreOutput, logprobs: list[TokenLogprobs]) -> bool:
        """Add an output of the engine; return whether a stop string ended the completion.

        Args:
            output: from the engine.
            logprobs: one entry for each new token, if requested.
        """
        self._logprob_of_beam = output.cumulative_logprob
        self.pooled = output.pooled
        num_shown = len(output.new_token_ids)
        if output.finish_reason is FinishReason.STOP and not self._shows_stop_token:
            num_shown -= 1  # the end-of-sequence or stop token
        chosen = output.logprobs or ()
        for position, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None:
                self.logprobs.append(logprobs[position])
            if self._sums_logprobs:
                self._sum_of_logprobs += chosen[position].logprobs[0]
            word = self._text.push(token_id, may_stop=self._may_stop()) if position < num_shown else None
            if word is not None:
                self._finish(FinishReason.STOP, word)
                return output.finish_reason is None
        if output.finish_reason is not None:
            word = self._text.finish(may_stop=self._may_stop())
            if word is None:
                self._finish(output.finish_reason, output.stop_reason)
                self._error = _error_of(output)
            else:
                self._finish(FinishReason.STOP, word)
        return False

    def snapshot(self) -> CompletionOutput:
        """Return a copy of the completion so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self._so_far(self.token_ids),
            logprobs=None if self.logprobs is None else self._so_far(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_type=self._error.kind or None if self._error is not None else None,
            cumulative_logprob=self.cumulative_logprob,
            error_param=None if self._error is None else self._error.param,
        )

    def _so_far(self, entries: list[T]) -> Sequence[T]:
        """Return a view of the list's current entries; copying it for each token would be quadratic."""
        return ListView(entries) if self.finish_reason is None else entries.copy()

    def _may_stop(self) -> bool:
        return len(self.token_ids) >= self._min_tokens

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason


def _error_of(output: EngineCoreOutput) -> ErrorInfo | None:
    """Return the error of a terminal output, if it has one; its `kind` may be empty."""
    if output.error is None:
        return None
    return ErrorInfo(output.error_type, output.error, output.error_param)


class RequestState:
    """A live request: its parameters, its completions so far, and how to notify its caller.

    Attributes:
        finished: whether all completions have ended.
        submit_time: when its timeouts began, on the clock of `ProcessedRequest.arrival_time`.
        is_repeating: whether its outputs from another server are being repeated, before an engine gets it.
        is_sent: whether the current engine has it.
        was_sent: whether any engine has had it.
        has_new_output: whether the engine that last received it has sent any output of it.
        num_crashes: engines that died while they had it.
        num_crashes_without_output: how many of the last of these in a row had no output of it.
        num_repeated_prompt_logprobs: how many of its prompt's log-probabilities are known already and will be
            sent again.
    """

    def __init__(
        self, processed: ProcessedRequest, completions: list[CompletionState], on_update: Callable[[], None]
    ) -> None:
        self.processed = processed
        self.request_id = processed.request_id
        self.completions = completions
        self.finished = False
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if processed.params.prompt_logprobs is None else [None]
        )
        self.num_cached_tokens = 0
        self.first_scheduled_time: float | None = None
        self.kv_transfer_params: Mapping[str, Any] | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.failure: QuireError | None = None
        self.on_update = on_update
        self.submit_time = processed.arrival_time
        self.is_repeating = False
        self.is_sent = False
        self.was_sent = False
        self.has_new_output = False
        self.num_crashes = 0
        self.num_crashes_without_output = 0
        self.num_repeated_prompt_logprobs = 0

    @property
    def live_completions(self) -> list[CompletionState]:
        """The completions that have not ended."""
        return [completion for completion in self.completions if completion.finish_reason is None]

    @property
    def live_sequence_ids(self) -> list[str]:
        """Sequence ids of the completions that have not ended."""
        return [completion.sequence_id for completion in self.live_completions]

    @property
    def has_all_prompt_logprobs(self) -> bool:
        """Whether no more log-probabilities of the prompt will come: the first completion asks for them."""
        num_prompt_tokens = len(self.processed.core_request.prompt_token_ids)
        is_complete = self.prompt_logprobs is None or len(self.prompt_logprobs) == num_prompt_tokens
        return is_complete or self.completions[0].finish_reason is not None

    @property
    def error_before_output(self) -> QuireError | None:
        """The error, if all completions failed before anything was generated; else None."""
        has_tokens = any(completion.token_ids for completion in self.completions)
        exceptions = [completion.exception for completion in self.completions]
        return None if has_tokens or None in exceptions else exceptions[0]

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output so far."""
        finished = self.finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.core_request.prompt_token_ids,
            outputs=self._outputs(finished=finished),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_time=self.first_scheduled_time,
            finished=finished,
            metrics=self._metrics() if finished else None,
            kv_transfer_params=self.kv_transfer_params,
        )

    def pooling_snapshot(self) -> PoolingRequestOutput:
        """Return a copy of the output so far, if the request is pooled."""
        [completion] = self.completions
        end, row = completion.snapshot(), completion.pooled
        data = None if row is None else np.frombuffer(row, dtype=np.float32)
        request = self.processed.core_request
        params = request.pooling_params
        if data is not None and params is not None and params.pooling_type == "all":
            data = data.reshape(len(request.prompt_token_ids), -1)
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.core_request.prompt_token_ids,
            outputs=PoolingOutput(data, end.finish_reason, end.error, end.error_type, end.error_param),
            num_cached_tokens=self.num_cached_tokens,
            finished=end.finished,
        )

    def _outputs(self, *, finished: bool) -> list[CompletionOutput]:
        """Return `n` completions: the first ones, or with `best_of` the best once all have ended."""
        params = self.processed.params
        if params.num_sequences == params.n:
            return [completion.snapshot() for completion in self.completions]
        if not finished:
            logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
            return [CompletionOutput(index, "", [], logprobs) for index in range(params.n)]
        best = sorted(self.completions, key=_rank)[: params.n]
        return [dataclasses.replace(one.snapshot(), index=index) for index, one in enumerate(best)]

    def _metrics(self) -> RequestMetrics:
        start = self.processed.arrival_time
        end = time.monotonic() if self.finish_time is None else self.finish_time
        first = end if self.first_token_time is None else self.first_token_time
        return RequestMetrics(
            time_to_first_token=first - start,
            total_time=end - start,
            num_output_tokens=sum(len(completion.token_ids) for completion in self.completions),
        )


def _rank(completion: CompletionState) -> tuple[bool, float]:
    """Return the sort key of `best_of`: most likely completions first, failed ones last."""
    return completion.finish_reason is FinishReason.ERROR, -(completion.cumulative_logprob or 0.0)


class OutputProcessor:
    """The table of live requests, updated with the engine's outputs.

    Outputs for sequences that have already ended here are ignored: every request has exactly one terminal
    output.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders = DecoderFactory(tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, CompletionState]] = {}
        self._token_texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_sequences(self) -> int:
        """Number of unfinished sequences, counting each beam of a search."""
        return len(self._sequences)

    @property
    def num_queued_sequences(self) -> int:
        """Number of unfinished sequences in the scheduler, where a beam search counts as one."""
        searches = (state for state in self._requests.values() if state.processed.params.beam_width)
        return self.num_sequences - sum(len(state.live_completions) - 1 for state in searches)

    def live_requests(self, request_id: str | None = None) -> list[RequestState]:
        """Return the live request with this id, if any; None: all, in order of arrival."""
        if request_id is None:
            return list(self._requests.values())
        state = self._requests.get(request_id)
        return [] if state is None else [state]

    def has(self, state: RequestState) -> bool:
        """Whether this very request is live, not another with the same id."""
        return self._requests.get(state.request_id) is state

    def get(self, request_id: str) -> RequestState | None:
        """Return the live request with this id, or None."""
        return self._requests.get(request_id)

    def add(self, processed: ProcessedRequest, on_update: Callable[[], None] = lambda: None) -> RequestState:
        """Add a request; `on_update` is called whenever it changes.

        Raises:
            DuplicateRequestError: its id is in use.
        """
        request_id = processed.request_id
        if request_id in self._requests:
            raise DuplicateRequestError(
                f"the request id {request_id!r} is in use by a live request; choose another",
                param="request_id",
            )
        stop = StopStrings(processed.params.stop)
        completions = [
            CompletionState(index, sequence_id, self._new_text(processed, stop), processed.params)
            for index, sequence_id in enumerate(processed.core_request.sequence_ids)
        ]
        state = RequestState(processed, completions, on_update)
        self._requests[request_id] = state
        for completion in completions:
            self._sequences[completion.sequence_id] = (state, completion)
        return state

    def apply(self, outputs: Iterable[EngineCoreOutput]) -> list[str]:
        """Apply the outputs of a step; return the ids of sequences in which a stop string was found."""
        to_stop: list[str] = []
        updated: dict[str, RequestState] = {}
        now = time.monotonic()
        for output in outputs:
            state, completion = self._sequences.get(output.request_id, (None, None))
            if state is None or completion is None:
                continue
            try:
                to_stop += self._apply_one(state, completion, output, now)
            except Exception as error:
                logger.exception("the output of request %r could not be processed", state.request_id)
                to_stop += state.live_sequence_ids
                self._fail(state, QuireError(f"the output could not be processed: {error!r}"))
                updated.pop(state.request_id, None)
                continue
            updated[state.request_id] = state
        for state in updated.values():
            if state.finished:
                state.finish_time = now
                del self._requests[state.request_id]
            state.on_update()
        return to_stop

    def refuse(self, sequence_ids: Iterable[str], failure: QuireError) -> None:
        """Fail the request that these sequences belong to."""
        for sequence_id in sequence_ids:
            state, _ = self._sequences.get(sequence_id, (None, None))
            if state is not None:
                self._fail(state, failure)

    def fail_all(self, failure: QuireError) -> None:
        """Fail all requests."""
        for state in list(self._requests.values()):
            self._fail(state, failure)

    def remove(self, state: RequestState) -> list[str]:
        """Remove a request if it is live; return the ids of its sequences that have not ended."""
        if not self.has(state):
            return []
        del self._requests[state.request_id]
        live = state.live_sequence_ids
        for sequence_id in live:
            self._sequences.pop(sequence_id, None)
        return live

    def _new_text(self, processed: ProcessedRequest, stop: StopStrings) -> StoppableText:
        params = processed.params
        decoder = self._decoders.make(
            processed.core_request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown=processed.shown_token_ids,
            is_verbatim=params.is_verbatim,
        )
        reasoning = processed.reasoning if params.stop else None
        return StoppableText(
            decoder,
            stop,
            include_stop=params.include_stop_str_in_output,
            reasoning=None if reasoning is None else ReasoningText(reasoning),
        )

    def _apply_one(
        self, state: RequestState, completion: CompletionState, output: EngineCoreOutput, now: float
    ) -> list[str]:
        """Apply one output; return its sequence id if a stop string ended it."""
        logprobs: list[TokenLogprobs] = []
        if completion.logprobs is not None:
            logprobs = [self._logprobs(entry) for entry in output.logprobs or ()]
        state.has_new_output = True
        stopped_here = completion.apply(output, logprobs)
        if completion.finish_reason is not None:
            del self._sequences[output.request_id]
            state.finished = not state.live_completions
        if completion.index == 0:  # the others hit its prefix
            state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        if state.first_scheduled_time is None:
            state.first_scheduled_time = output.first_scheduled_time
        if state.kv_transfer_params is None:
            state.kv_transfer_params = output.kv_transfer_params
        if output.new_token_ids and state.first_token_time is None:
            state.first_token_time = now
        if output.prompt_logprobs and state.prompt_logprobs is not None:
            known = min(state.num_repeated_prompt_logprobs, len(output.prompt_logprobs))
            state.num_repeated_prompt_logprobs -= known
            new = output.prompt_logprobs[known:]
            state.prompt_logprobs.extend(self._logprobs(entry) for entry in new)
        return [output.request_id] if stopped_here else []

    def _fail(self, state: RequestState, failure: QuireError) -> None:
        state.failure = copy.copy(failure)  # each caller raises its own copy
        self.remove(state)
        state.on_update()

    def _logprobs(self, entry: PositionLogprobs) -> TokenLogprobs:
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self._token_text(token_id))
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._tokenizer.token_text(token_id)
        return text
