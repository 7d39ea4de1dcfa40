"""Threads in which long texts are tokenized, so that neither the event loop nor short texts wait for them.

Conversations are always prepared in threads, because another process renders their template.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from quire.errors import QueueFullError, RequestTimeoutError
from quire.sampling_params import SamplingParams

T = TypeVar("T")

INLINE_LENGTH = 2_000
"""Characters up to which a text is tokenized at once: it takes less than a millisecond."""

LONG_LENGTH = 100_000
"""Characters from which a text waits for other long ones only: it takes more than 30 milliseconds."""

MAX_WAITING = 256
"""Texts that may wait for a thread; each may be as large as a request's body."""

TIMEOUT = 60.0
"""Seconds after which a request is given up whose text is not tokenized."""

_PER_MESSAGE = 20  # characters that take as long as a message's part of the template
_PER_TOKEN_ID = 0.25  # and as checking a token id


def length_of(prompt: Any, params: Any) -> int:
    """Return how many characters of text take as long to prepare as this request, which is not checked yet.

    Args:
        prompt: text, token ids, or the messages of a conversation.
        params: of type `SamplingParams`, if they are valid.
    """
    length = sum(map(len, params.bad_words)) if isinstance(params, SamplingParams) else 0
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return length + (len(prompt) if isinstance(prompt, str) else 0)
    if not prompt or not isinstance(prompt[0], Mapping):
        return length + int(_PER_TOKEN_ID * len(prompt))
    if _PER_MESSAGE * len(prompt) >= LONG_LENGTH:
        return LONG_LENGTH  # and there are many to look at
    return length + _PER_MESSAGE * len(prompt) + sum(map(_length_of_message, prompt))


def _length_of_message(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else message
    return len(content if isinstance(content, str) else str(content))


class PreparationThreads:
    """Calls that prepare requests, each in the event loop or one of three threads, by the length of its text.

    The tokenizer lets other threads run meanwhile. There is one thread for each class of lengths, so that the
    memory of one long text is in use at a time, and a text waits for others of its class only. Threads end
    when there is nothing to do.
    """

    def __init__(self) -> None:
        self._short = _Worker()
        self._medium = _Worker()
        self._long = _Worker()

    async def run(self, length: int, call: Callable[[], T], *, may_wait: bool = False) -> T:
        """Return what `call` returns, for a request with a text of this length.

        Args:
            length: characters.
            call: returns the prepared request.
            may_wait: the call may wait for another process, which the event loop must not.

        Raises:
            QueueFullError: too many texts wait already.
            RequestTimeoutError: it took too long.
            Exception: whatever `call` raises.
        """
        if length <= INLINE_LENGTH and not may_wait:
            return call()
        job = self._worker(length).submit(call)
        try:
            async with asyncio.timeout(TIMEOUT):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request's text of {length} characters was not tokenized within {TIMEOUT:g} s; "
                "try again later, or send less text"
            ) from None

    def _worker(self, length: int) -> _Worker:
        if length <= INLINE_LENGTH:
            return self._short
        return self._medium if length < LONG_LENGTH else self._long


class _Job(concurrent.futures.Future[T], Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def run(self) -> None:
        """Run the call, unless nobody waits for its result any more."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class _Worker:
    """Runs jobs one after another, in a thread that ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: collections.deque[_Job[Any]] = collections.deque()
        self._is_running = False

    def submit(self, call: Callable[[], T]) -> _Job[T]:
        """Return the job that will run `call`.

        Raises:
            QueueFullError: too many jobs wait.
        """
        job = _Job(call)
        with self._lock:
            if len(self._jobs) >= MAX_WAITING:
                raise QueueFullError(
                    f"{len(self._jobs)} requests wait for their text to be tokenized; the limit is "
                    f"{MAX_WAITING}; try again later, or send shorter prompts"
                )
            self._jobs.append(job)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="quire-tokenizing", daemon=True).start()
        return job

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            job.run()
            del job  # what it holds may be large
