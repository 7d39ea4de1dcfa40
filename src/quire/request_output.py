"""Outputs of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from quire.status import FinishReason

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Logprob:
    """One candidate token at one position: log-probability (nats), rank (1 is likeliest), text."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""The chosen token and the likeliest ones at one position, by token id."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    `token_ids` and `logprobs` are lists once it has ended; before that, sequences to read and compare.
    `logprobs` has one entry for each of `token_ids`, or is None if not asked for: the chosen token, and the
    `SamplingParams.logprobs` likeliest ones, which may include it. `cumulative_logprob` is the sum of the
    chosen tokens' log-probabilities in nats, known with `logprobs`, `best_of` and beam search. `stop_reason`
    is the stop string or stop token id that ended it, None for end-of-sequence or any other end. With finish
    reason "error", `error` says what was wrong, `error_type` names the class in `quire.errors` that it
    belongs to, if it does, and `error_param` the parameter at fault, if one is.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_type: str | None = None
    cumulative_logprob: float | None = None
    error_param: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """All that is known of a request: cumulative, not the difference to the last output.

    `outputs` are the `n` completions; with `best_of` above n and with beam search they are empty until all
    have ended, and then the best comes first.
    `prompt_logprobs` has one entry for each prompt token, the first of them None. `num_cached_tokens` counts
    prompt tokens whose KV the first sequence found in the prefix cache, or loaded, when it first ran: what
    other requests had computed. `first_scheduled_time` is when a sequence of it first
    ran, in seconds on the monotonic clock; None: none has, as far as is known. `metrics` is filled when the
    request has finished.
    `kv_transfer_params` is what another engine needs to find the request's KV, if a KV connector keeps it: of
    the completion that ended first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """What a prompt has become: `data` is a row, [hidden] float32, not to be written to.

    `data` is None if the request has ended otherwise than with finish reason "stop", or not yet. `error`,
    `error_type` and `error_param` are as in `CompletionOutput`.
    """

    data: npt.NDArray[np.float32] | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_type: str | None = None
    error_param: str | None = None


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput:
    """All that is known of a request that is pooled; the fields are as in `RequestOutput`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int = 0
    finished: bool = False


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """A finished request's times in seconds: to the first token, and from arrival to the end.

    `num_output_tokens` counts the tokens of all completions, with `best_of` also of those that are discarded.
    """

    time_to_first_token: float
    total_time: float
    num_output_tokens: int


class ListView(Sequence[T], Generic[T]):
    """The entries that a list had when this was made; it must only grow. Equal to a list of the same entries.

    Args:
        entries: the list.
    """

    __slots__ = ("_entries", "_length")

    def __init__(self, entries: list[T]) -> None:
        self._entries = entries
        self._length = len(entries)

    @override
    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    @override
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step > 0:
                return self._entries[start : max(start, stop) : step]
            return [self._entries[position] for position in range(start, stop, step)]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"there are {self._length} entries, and none at {index}")
        return self._entries[position]

    @override
    def __iter__(self) -> Iterator[T]:
        return islice(self._entries, self._length)

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | ListView):
            return len(other) == self._length and all(map(_equal, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    @override
    def __repr__(self) -> str:
        return repr(list(self))


def _equal(one: object, other: object) -> bool:
    return one == other
