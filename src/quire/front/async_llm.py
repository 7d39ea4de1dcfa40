"""`AsyncLLM`: an engine in a process of its own, for many callers on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.messages import (
    EngineInfo,
    Explain,
    GetStats,
    Reply,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from quire.errors import EngineDeadError
from quire.front.input_processor import ProcessedRequest
from quire.front.live_requests import LiveRequests
from quire.front.process_client import SHUTDOWN_TIMEOUT, EngineProcess
from quire.models.checkpoints.hub import resolve_model
from quire.request_output import RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import SchedulerStats

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

STEP_TIMEOUT = 60.0
"""Seconds without a finished step, while requests are unfinished, after which the engine counts as hung."""

ABORT_TIMEOUT = 1.0
"""Seconds that a shutdown waits for the engine to answer the requests that it aborts."""

EXPLAINED_AT_ONCE = 20
"""Sequences to ask about between two steps: with a long queue, an answer takes a millisecond or more."""

LONG_TEXT = 20_000
"""Characters from which on a prompt is tokenized in a thread, so that other callers need not wait."""


class AsyncLLM:
    """An engine process and its callers on one event loop.

    The process is started at once; `wait_until_ready` tells when the model is loaded. Requests made before
    that wait for it.

    Args:
        config: of the engine; the defaults if None.

    Raises:
        ModelNotFoundError: there is no such model.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = EngineConfig() if config is None else config
        model_path = resolve_model(self.config.model)
        self._process = EngineProcess(self.config, model_path)

        # slow: meanwhile, the engine process imports torch
        from quire.models.checkpoints.tokenizer_reading import read_tokenizer

        self._requests = LiveRequests(self._process, read_tokenizer(model_path))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._closing = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._requests.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What the engine is; only once it is ready."""
        return self._requests.info

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that have had no terminal output yet."""
        return len(self._requests.outputs)

    async def wait_until_ready(self, on_progress: Callable[[int, int], None] | None = None) -> EngineInfo:
        """Return once the engine takes requests.

        Args:
            on_progress: called while weights load with (bytes done, bytes in all).

        Raises:
            QuireError: why the engine could not be built, as its process found it.
            EngineDeadError: its process has ended.
        """
        self._attach()
        if on_progress is not None:
            self._requests.on_progress = on_progress
        await self._wait_for(lambda: self._requests.is_ready or self._requests.failure is not None)
        return self._requests.info

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield all that is known of a request whenever there is more, the last time with `finished` set.

        A slow caller misses intermediate outputs, never the last. Closing the generator, or cancelling the
        task that waits in it, aborts the request.

        Args:
            prompt: text, or token ids.
            sampling_params: how to sample and when to stop; the defaults if None.
            request_id: the caller's name for it, unique among live requests; made up if None.
            options: fields of `RequestOptions`: priority, cache_salt, tenant, timeout, …

        Raises (when iterated):
            InvalidRequestError: it can never be served as written, or its grammar is invalid.
            QueueFullError: too many requests wait.
            RequestTimeoutError: it timed out before anything was generated. One that has begun ends with the
                finish reason "error" instead, and keeps its output so far.
            EngineDeadError: the engine has ended.
        """
        return self._stream(
            self._requests.prepare,
            prompt,
            len(prompt) if isinstance(prompt, str) else 0,
            sampling_params,
            request_id=request_id,
            **options,
        )

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for a conversation as the model's chat template writes it."""
        return self._stream(
            self._requests.prepare_chat,
            messages,
            sum(len(str(message)) for message in messages),
            sampling_params,
            request_id=request_id,
            **options,
        )

    def abort(self, request_id: str) -> None:
        """End a request from outside; its generator yields a last output with finish reason "abort"."""
        self._requests.abort(request_id)

    async def stats(self) -> SchedulerStats:
        """Return the scheduler's state as it is now."""
        reply = await self._call(GetStats)
        assert reply.stats is not None
        return reply.stats

    async def explain(self, request_id: str) -> list[str]:
        """Return what a request does or waits for: a sentence for each completion that has not ended.

        A beam search is explained as one. There is nothing to say of a request that has ended, or is unknown.
        """
        return (await self.explain_all([request_id]))[0]

    async def explain_all(self, request_ids: Sequence[str]) -> list[list[str]]:
        """Return what `explain` would for each of these requests; the engine keeps running."""
        await self.wait_until_ready()
        groups = [self._requests.queued_sequence_ids(request_id) for request_id in request_ids]
        asked = [sequence_id for group in groups for sequence_id in group]
        texts: list[str] = []
        while len(texts) < len(asked):
            some = asked[len(texts) : len(texts) + EXPLAINED_AT_ONCE]
            texts += (await self._call(functools.partial(Explain, sequence_ids=some))).texts
        sentences = iter(texts)
        return [list(itertools.islice(sentences, len(group))) for group in groups]

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while any block is in use."""
        return (await self._call(ResetPrefixCache)).done

    def check_health(self) -> None:
        """Return if the engine is well or still starting.

        Raises:
            EngineDeadError: it has ended, or has finished no step for `STEP_TIMEOUT` seconds though requests
                are unfinished.
        """
        if self._requests.failure is not None or not self._process.is_alive:
            raise EngineDeadError(str(self._requests.failure or "the engine process has ended"))
        silence = time.monotonic() - self._requests.last_step_time
        if self._requests.outputs and silence > STEP_TIMEOUT:
            raise EngineDeadError(
                f"{self.num_unfinished_requests} requests are unfinished, but no step has finished for "
                f"{silence:.0f} s; the limit is {STEP_TIMEOUT:.0f} s"
            )

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """End the engine; new requests are refused from now on.

        Args:
            drain_timeout: seconds that live requests get to finish before they are aborted.
        """
        self._closing = True
        if self._requests.failure is None and self._requests.is_ready:
            self._attach()
            await self._wait_for(self._is_idle, timeout=drain_timeout)
            self._requests.abort(None)
            await self._wait_for(self._is_idle, timeout=ABORT_TIMEOUT)
            self._process.send(Shutdown())
            await self._wait_for(lambda: self._requests.failure is not None, timeout=SHUTDOWN_TIMEOUT)
        self._detach()
        self._requests.close()
        self._announce_change()

    async def _stream(
        self,
        prepare: Callable[..., ProcessedRequest],
        prompt: Any,
        num_characters: int,
        params: SamplingParams | None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.wait_until_ready()
        params = SamplingParams() if params is None else params
        if num_characters < LONG_TEXT:
            processed = prepare(prompt, params, **options)
        else:
            processed = await asyncio.to_thread(prepare, prompt, params, **options)
        if self._closing:
            raise EngineDeadError("the engine is shutting down and takes no new requests")
        updated = asyncio.Event()
        state = self._requests.submit(processed, updated.set)
        try:
            while True:
                await updated.wait()
                updated.clear()
                if state.failure is not None:
                    raise state.failure
                output = state.snapshot()
                if output.finished and (error := state.error_before_output) is not None:
                    raise error
                yield output
                if output.finished:
                    return
        finally:
            self._requests.discard(state)

    async def _call(self, make: Callable[[int], ToEngine]) -> Reply:
        await self.wait_until_ready()
        replies: list[Reply] = []
        self._requests.call(make, replies.append)
        await self._wait_for(lambda: bool(replies) or self._requests.failure is not None)
        self._requests.raise_failure()
        return replies[0]

    async def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until `condition` holds after some message, or `timeout` seconds have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._changed.wait()

    def _is_idle(self) -> bool:
        return not self._requests.outputs or self._requests.failure is not None

    def _attach(self) -> None:
        """Have the running event loop watch the engine process."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._requests.failure is not None:
            return
        self._loop = loop
        self._changed = asyncio.Event()
        loop.add_reader(self._process.message_fd, self._on_message)
        loop.add_reader(self._process.death_fd, self._on_message)
        loop.call_soon(self._on_message)  # what came before anyone watched

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._process.message_fd)
            self._loop.remove_reader(self._process.death_fd)
        self._loop = None

    def _on_message(self) -> None:
        if self._loop is None:
            return
        self._requests.receive(0)
        if self._requests.failure is not None:
            self._detach()
            self._process.close()
        self._announce_change()

    def _announce_change(self) -> None:
        """Wake everyone who waits for a condition to hold."""
        self._changed.set()
        self._changed = asyncio.Event()
