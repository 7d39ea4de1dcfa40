"""Threads in which long texts are tokenized, so that neither the event loop nor short texts wait for them.

Conversations are always prepared in threads, because another process renders their template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.config import SchedulerConfig
from quire.errors import QueueFullError, RequestTimeoutError
from quire.front.text.worker_thread import TooManyJobsError, WorkerThread
from quire.sampling_params import SamplingParams

T = TypeVar("T")

INLINE_LENGTH = 2_000
"""Characters up to which a text is tokenized at once: it takes less than a millisecond."""

LONG_LENGTH = 100_000
"""Characters from which a text has the thread for long texts: it takes more than 30 milliseconds."""

MAX_LONG_WAITING = 256
"""Maximum number of long texts waiting for their thread; each may be as large as a request's body."""

TIMEOUT = 60.0
"""Seconds after which a request fails if its text is not tokenized."""

_PER_MESSAGE = 20  # characters that take as long as rendering a message
_PER_TOKEN_ID = 0.25  # as long as checking a token id


def length_of(prompt: Any, params: Any) -> int:
    """Return the number of characters that take as long to prepare as this (unchecked) request.

    Args:
        prompt: text, token ids, or the messages of a conversation.
        params: `SamplingParams`, if they are valid.
    """
    length = sum(map(len, params.bad_words)) if isinstance(params, SamplingParams) else 0
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return length + (len(prompt) if isinstance(prompt, str) else 0)
    if not prompt or not isinstance(prompt[0], Mapping):
        return length + int(_PER_TOKEN_ID * len(prompt))
    if _PER_MESSAGE * len(prompt) >= LONG_LENGTH:
        return LONG_LENGTH  # without looking at all of them
    return length + _PER_MESSAGE * len(prompt) + sum(map(_length_of_message, prompt))


def _length_of_message(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else message
    return len(content if isinstance(content, str) else str(content))


class PreparationThreads:
    """Prepares requests in the event loop or one of three threads, by the length of their text.

    The tokenizer releases the GIL. There is one thread for each class of lengths, so that one long text is in
    memory at a time, and a text only waits for others of its class. Idle threads end.

    Args:
        scheduler: as many texts may wait for a thread as requests can run and wait in it.
    """

    def __init__(self, scheduler: SchedulerConfig) -> None:
        self._scheduler = scheduler
        max_waiting = scheduler.max_num_seqs + scheduler.max_num_queued_reqs
        self._short, self._medium = (WorkerThread("quire-tokenizing", max_waiting) for _ in range(2))
        self._long = WorkerThread("quire-tokenizing", MAX_LONG_WAITING)

    async def run(self, length: int, call: Callable[[], T], *, may_wait: bool = False) -> T:
        """Return what `call` returns, for a request with a text of this length.

        Args:
            length: characters.
            call: returns the prepared request.
            may_wait: whether the call may wait for another process, which the event loop must not.

        Raises:
            QueueFullError: too many texts wait already.
            RequestTimeoutError: it took too long.
            Exception: whatever `call` raises.
        """
        if length <= INLINE_LENGTH and not may_wait:
            return call()
        try:
            job = self._worker(length).submit(call)
        except TooManyJobsError:
            raise self._refusal(length) from None
        try:
            async with asyncio.timeout(TIMEOUT):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request's text of {length} characters was not tokenized within {TIMEOUT:g} s; "
                "try again later, or send less text"
            ) from None

    def _refusal(self, length: int) -> QueueFullError:
        if length >= LONG_LENGTH:
            return QueueFullError(
                f"{MAX_LONG_WAITING} requests with texts of {LONG_LENGTH} characters or more wait for them "
                "to be tokenized, which is the limit; try again later, or send less text"
            )
        seqs, queued = self._scheduler.max_num_seqs, self._scheduler.max_num_queued_reqs
        return QueueFullError(
            f"{seqs + queued} requests wait for their text to be tokenized, as many as can run and wait "
            f"(max_num_seqs {seqs} and max_num_queued_reqs {queued}); try again later"
        )

    def _worker(self, length: int) -> WorkerThread:
        if length <= INLINE_LENGTH:
            return self._short
        return self._medium if length < LONG_LENGTH else self._long
