"""`AsyncLLM`: an engine in its own process, for concurrent callers on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.messages import (
    EngineInfo,
    GetStats,
    ResetPrefixCache,
    Shutdown,
)
from quire.errors import (
    CrashLoopError,
    EngineAsleepError,
    EngineDeadError,
    QueueFullError,
    QuireError,
    RequestTimeoutError,
)
from quire.front.batch import Output
from quire.front.continuation import OUTPUTS_PER_TURN, SequenceOutput, repeated, require_continuable
from quire.front.control import Explaining, PauseMode, Pausing
from quire.front.kv_files import KVSaving, Prompt, restore_message
from quire.front.live_requests import ASLEEP, LiveRequests
from quire.front.loop_driver import LoopDriver
from quire.front.process.client import SHUTDOWN_TIMEOUT
from quire.front.process.resumption import RecoveryStats
from quire.front.process.supervision import EngineSupervisor
from quire.front.similarity import pair_output
from quire.front.text.input_processor import InputProcessor, ProcessedRequest
from quire.front.text.output_processor import RequestState
from quire.front.text.preparation_threads import PreparationThreads, length_of
from quire.models.checkpoints.engine_files import resolve_files
from quire.pooling_params import PoolingParams
from quire.request_output import PoolingRequestOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import SchedulerStats

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

ABORT_TIMEOUT = 1.0
"""Seconds that a shutdown waits for the last outputs of aborted requests."""


class AsyncLLM:
    """An engine in its own process, used from one event loop.

    The constructor starts the process and returns; `wait_until_ready` waits until the model is loaded.
    Requests may be made before that.

    Args:
        config: engine configuration; None: the defaults.

    Raises:
        ModelNotFoundError: the model cannot be found.
        ConfigError: the chat template that the configuration names cannot be used.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.model_path, self.config = resolve_files(EngineConfig() if config is None else config)
        self._engine = EngineSupervisor(self.config, self.model_path)
        self._threads = PreparationThreads(self.config.scheduler)
        self._requests = LiveRequests.of(self._engine, self.config, self.model_path)
        self._engine.watch_for(self._requests)
        self._driver = LoopDriver(self._engine, self._requests)
        self._closing = False
        self._explaining = Explaining(self._requests, self._driver.call)
        self._pausing = Pausing(self._engine, self._requests, self._driver)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._requests.tokenizer

    @property
    def info(self) -> EngineInfo:
        """Information about the engine, available once `wait_until_ready` has returned.

        Raises:
            QuireError: the engine could not be built, or has ended.
        """
        return self._requests.info

    @property
    def failure(self) -> QuireError | None:
        """Why the engine has ended for good; None while there is one, or another is being started."""
        return self._requests.failure

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests without a terminal output."""
        return len(self._requests.outputs)

    @property
    def latest_stats(self) -> SchedulerStats | None:
        """The scheduler's last reported state; a busy engine reports ten times a second."""
        return self._requests.latest_stats

    @property
    def recovery_stats(self) -> RecoveryStats:
        """Counters of engine restarts and of what became of their requests."""
        engine, resumption = self._engine, self._requests.resumption
        return RecoveryStats(
            engine.num_restarts, engine.num_hangs, resumption.num_resumed, resumption.num_quarantined
        )

    def prompt_backlog(self) -> tuple[int, float]:
        """Return the prompt tokens of requests without a first token, and the age of the oldest, seconds."""
        live = self._requests.outputs.live_requests()
        waiting = [state for state in live if state.first_token_time is None]
        num_tokens = sum(len(state.processed.core_request.prompt_token_ids) for state in waiting)
        now = time.monotonic()
        return num_tokens, max((now - state.submit_time for state in waiting), default=0.0)

    async def wait_until_ready(self, on_progress: Callable[[int, int], None] | None = None) -> EngineInfo:
        """Wait until the engine accepts requests.

        Args:
            on_progress: called with (bytes read, total bytes) while the weights load.

        Raises:
            QuireError: the engine could not be built.
            EngineDeadError: the engine process has ended.
        """
        if on_progress is not None:
            self._requests.on_progress = on_progress
        return await self._driver.wait_until_ready()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far whenever it has grown; the last output has `finished` set.

        A slow caller misses intermediate outputs, never the last. Closing the generator, or cancelling the
        task that awaits it, aborts the request. Errors are raised when the generator is iterated.

        Args:
            prompt: text, or token ids.
            sampling_params: how to sample and when to stop; None: the defaults.
            request_id: unique among live requests; None: generated.
            options: those of `LLM.generate`; `outputs_so_far`, the outputs of an engine of another server,
                which are yielded first and then continued; and `before_submit`, which is awaited with the
                prepared request and may raise to refuse it. It returns None, or, if the request continues an
                earlier call, when that call began (`time.monotonic()` seconds): the timeout counts from then,
                and the request is retried while too many are waiting.

        Raises:
            InvalidRequestError: the request or its grammar is invalid.
            DuplicateRequestError: `request_id` is in use.
            ConfigError: there is no option of that name.
            QueueFullError: too many requests are waiting.
            RequestTimeoutError: the request timed out before anything was generated. If it times out later,
                it ends with finish reason "error" instead, and its output is kept.
            EngineDeadError: the engine has ended.
            EngineAsleepError: the engine is asleep.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        call = InputProcessor.process
        return self._stream(RequestState.snapshot, call, prompt, params, request_id=request_id, **options)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for a conversation, which the chat template turns into a prompt.

        Args:
            messages: messages of the conversation.
            sampling_params: as for `generate`.
            request_id: as for `generate`.
            options: `tools` and the options of `LLM.chat`; and `before_submit`, as for `generate`.

        Raises:
            QuireError: as `generate`; InvalidRequestError also if the template refuses the conversation.
        """
        return self._stream(
            RequestState.snapshot,
            InputProcessor.process_chat,
            messages,
            SamplingParams() if sampling_params is None else sampling_params,
            may_wait=True,
            request_id=request_id,
            **options,
        )

    def encode(
        self,
        prompt: str | Sequence[int],
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the row of a prompt, see `LLM.encode`.

        Closing the generator, or cancelling the task that awaits it, aborts the request.

        Args:
            prompt: text, or token ids.
            pooling_params: how to make the row; None: the model's own.
            request_id: as for `generate`.
            options: as for `generate`.

        Raises:
            QuireError: as `generate`; InvalidRequestError also if the model generates.
        """
        return self._stream(
            RequestState.pooling_snapshot,
            InputProcessor.process_pooling,
            prompt,
            PoolingParams() if pooling_params is None else pooling_params,
            may_wait="second_text" in options and self.tokenizer.joins_pairs,
            request_id=request_id,
            **options,
        )

    def embed(
        self, prompt: str | Sequence[int], pooling_params: PoolingParams | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the embedding of a text, see `LLM.embed`."""
        return self.encode(prompt, pooling_params, task="embed", **options)

    def classify(
        self, prompt: str | Sequence[int], pooling_params: PoolingParams | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the probabilities of a text's labels, see `LLM.classify`."""
        return self.encode(prompt, pooling_params, task="classify", **options)

    def reward(
        self, prompt: str | Sequence[int], **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the reward of a text, see `LLM.reward`."""
        return self.classify(prompt, PoolingParams(activation=False), **options)

    async def score(
        self,
        text_1: str,
        text_2: str,
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield how well two texts go together, see `LLM.score`.

        With a model that makes embeddings, these are two requests, one after the other, whose ids end in /0
        and /1.
        """
        info = await self._driver.wait_until_ready()
        if not info.makes_embeddings:
            pair = {"second_text": text_2, "request_id": request_id, "prompt_name": prompt_name, **options}
            async with contextlib.aclosing(
                self.encode(text_1, pooling_params, task="score", **pair)
            ) as scores:
                async for output in scores:
                    yield output
            return
        embedded = []
        for number, (text, name) in enumerate([(text_1, prompt_name), (text_2, None)]):
            own_id = None if request_id is None else f"{request_id}/{number}"
            own = {"truncation_side": "right", **options, "request_id": own_id, "prompt_name": name}
            async with contextlib.aclosing(self.embed(text, pooling_params, **own)) as outputs:
                embedded += [output async for output in outputs if output.finished]
        yield pair_output(info.similarity, *embedded)

    async def tokenize_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of the prompt that the chat template makes of a conversation.

        Args:
            messages: messages of the conversation.
            options: those of `chat` that reach the template, such as `tools`.

        Raises:
            InvalidRequestError: the template refuses the conversation, or it is too long for the model.
        """
        processed = await self.prepare_chat(messages, SamplingParams(), **options)
        return processed.core_request.prompt_token_ids

    async def prepare(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, **options: Any
    ) -> ProcessedRequest:
        """Return the request that `generate` would make of its arguments, without making it.

        Raises:
            InvalidRequestError: the request is invalid.
        """
        return await self._prepared(InputProcessor.process, prompt, sampling_params, **options)

    async def prepare_chat(
        self, messages: Sequence[dict[str, Any]], sampling_params: SamplingParams, **options: Any
    ) -> ProcessedRequest:
        """Return the request that `chat` would make of its arguments, without making it.

        Raises:
            InvalidRequestError: the template refuses the conversation, or the request is invalid.
        """
        process = InputProcessor.process_chat
        return await self._prepared(process, messages, sampling_params, may_wait=True, **options)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: may be empty.
            add_special_tokens: whether to add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: the text is too long for the model, or is not valid Unicode.
        """
        await self._driver.wait_until_ready()
        call = functools.partial(self._requests.inputs.tokenize, text, add_special_tokens=add_special_tokens)
        return await self._threads.run(len(text), call)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        await self._driver.wait_until_ready()
        call = functools.partial(self._requests.inputs.detokenize, token_ids)
        return await self._threads.run(length_of(token_ids, None), call)

    def abort(self, request_id: str) -> None:
        """Abort a request; its generator yields a last output with finish reason "abort"."""
        self._requests.abort(request_id)

    def release_kv(self, transfer_id: str) -> None:
        """Free the KV held for a peer that will not read it.

        Args:
            transfer_id: from the `kv_transfer_params` of the request or its answer. A prompt that arrives
                with it later is computed, but not lent. An unknown id has no effect.
        """
        self._requests.release_kv(transfer_id)

    async def stats(self) -> SchedulerStats:
        """Return the current state of the scheduler.

        Raises:
            EngineDeadError: the engine has ended, or another is being started.
            EngineAsleepError: the engine is asleep.
        """
        reply = await self._driver.call(GetStats)
        assert reply.stats is not None
        return reply.stats

    async def explain(self, request_id: str) -> list[str]:
        """Return what a request is doing or waiting for: a sentence for each unfinished completion.

        A beam search gets one sentence. The list is empty if the request has ended or is unknown.

        Raises:
            EngineDeadError: the engine has ended, or another is being started.
        """
        return (await self.explain_all([[request_id]]))[0]

    async def explain_all(self, groups: Sequence[Sequence[str]], limit: int | None = None) -> list[list[str]]:
        """Return what the requests of each group are doing or waiting for, as `explain` does.

        Args:
            groups: lists of request ids, such as those of one call.
            limit: maximum sentences per group; one more says how many are left out; None: no limit.

        Raises:
            EngineDeadError: the engine has ended, or another is being started.
        """
        await self._driver.wait_until_ready()
        return await self._explaining.explain(groups, limit)

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache and KV tier; while any block is in use, do nothing and return False.

        Raises:
            EngineDeadError: the engine has ended, or another is being started.
            EngineAsleepError: the engine is asleep.
        """
        return (await self._driver.call(ResetPrefixCache)).done

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> bool:
        """Admit no requests until `resume_generation`; new ones wait. The pause survives an engine crash.

        Args:
            mode: what happens to live requests. "abort": they are aborted. "wait": they finish first. "keep":
                they stop where they are and continue from there.
            clear_cache: whether to clear the prefix cache, if mode is not "keep".

        Returns:
            Whether the prefix cache was cleared; pins and peers may prevent it.

        Raises:
            InvalidRequestError: mode is "wait", and the engine is paused and keeps requests.
        """
        await self._driver.wait_until_ready()
        return await self._pausing.pause(mode, clears_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End the pause."""
        await self._driver.wait_until_ready()
        await self._pausing.resume()

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return self._pausing.is_paused

    async def sleep(self, mode: PauseMode = "abort") -> None:
        """End the engine until `wake_up`, which frees the memory of its weights and KV.

        New requests are refused meanwhile with `EngineAsleepError`.

        Args:
            mode: what happens to live requests. "abort": they are aborted. "wait": they finish first. "keep":
                they continue after `wake_up`, with unchanged tokens.

        Raises:
            InvalidRequestError: mode is "wait", and the engine is paused and keeps requests.
        """
        await self._driver.wait_until_ready()
        await self._pausing.sleep(mode)

    async def wake_up(self) -> None:
        """Start a sleeping engine, and return when it accepts requests."""
        await self._driver.wait_until_ready()
        await self._pausing.wake()

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep."""
        return self._pausing.is_asleep

    async def save_kv(self, prompt: Prompt, path: str | Path, *, cache_salt: str = "") -> int:
        """Save the KV of a prompt to a file, see `LLM.save_kv`.

        Raises:
            KVFileError: as `LLM.save_kv`.
            InvalidRequestError: as `LLM.save_kv`.
            EngineDeadError: the engine has ended, or another is being started.
            EngineAsleepError: the engine is asleep.
        """
        await self._driver.wait_until_ready()
        saving = KVSaving(self._requests, prompt, path, cache_salt)
        while not saving.note(await self._driver.call(saving.message)):
            async for _ in self.generate(saving.token_ids, saving.params, cache_salt=cache_salt):
                pass
        return saving.num_tokens

    async def restore_kv(self, path: str | Path, *, cache_salt: str = "") -> list[int]:
        """Restore the KV of a prompt from a file, see `LLM.restore_kv`.

        Raises:
            KVFileError: as `LLM.restore_kv`.
            EngineDeadError: the engine has ended, or another is being started.
            EngineAsleepError: the engine is asleep.
        """
        return (await self._driver.call(restore_message(path, cache_salt))).token_ids

    def check_health(self) -> None:
        """Return if the engine is healthy or is starting for the first time. Thread-safe.

        Raises:
            EngineDeadError: the engine has ended, is being restarted, or has unfinished requests but has not
                finished a step for `watchdog_timeout` seconds.
            EngineAsleepError: the engine is asleep.
        """
        requests = self._requests
        if requests.failure is not None:
            raise EngineDeadError(str(requests.failure))
        if requests.is_asleep:
            raise EngineAsleepError(ASLEEP)
        if requests.has_started and not requests.is_ready:
            raise EngineDeadError("the engine is being restarted; live requests wait for it")
        silence = time.monotonic() - requests.last_step_time
        limit = self.config.supervision.watchdog_timeout
        if requests.outputs and limit and silence > limit:
            raise EngineDeadError(
                f"{self.num_unfinished_requests} requests are unfinished, but no step has finished in "
                f"the last {silence:.0f} s; the limit is {limit:g} s (watchdog_timeout)"
            )

    async def wait_for_crash_loop(self) -> CrashLoopError:
        """Wait until engines have died so often that none is started any more; return the reason."""
        self._driver.attach()
        await self._driver.wait_for(lambda: isinstance(self._requests.failure, CrashLoopError))
        assert isinstance(self._requests.failure, CrashLoopError)
        return self._requests.failure

    async def shutdown(self, drain_timeout: float = 0.0, end_timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """Shut the engine down; new requests are rejected.

        Args:
            drain_timeout: seconds to let live requests finish before they are aborted.
            end_timeout: seconds for the engine to abort them and exit, before it is killed.
        """
        self._closing = True
        if self._requests.failure is None and self._requests.has_started:
            self._driver.attach()
            await self._driver.wait_for(self._is_idle, timeout=drain_timeout)
            self._engine.retire()
            self._requests.abort(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_timeout):
                    await self._driver.wait_for(self._is_idle, timeout=ABORT_TIMEOUT)
                    self._engine.send(Shutdown())
                    self._driver.process()  # without an engine, no message reports its end
                    await self._driver.wait_for(lambda: self._requests.failure is not None)
        self._driver.detach()
        self._engine.close(0)
        self._requests.close()

    async def _stream(
        self,
        snapshot: Callable[[RequestState], Output],
        process: Callable[..., ProcessedRequest],
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        may_wait: bool = False,
        before_submit: Callable[[ProcessedRequest], Awaitable[float | None]] | None = None,
        outputs_so_far: Sequence[Sequence[SequenceOutput]] = (),
        **options: Any,
    ) -> AsyncGenerator[Output, None]:
        processed = await self._prepared(process, prompt, params, may_wait=may_wait, **options)
        if outputs_so_far:
            require_continuable(processed, outputs_so_far, self.info.vocab_size)
        begun_at = None if before_submit is None else await before_submit(processed)
        timeout = processed.core_request.options.timeout
        if timeout is None:
            timeout = self.config.scheduler.request_timeout
        while True:
            if begun_at is not None and timeout:
                _count_timeout_from(begun_at, timeout, processed)
            if self._closing:
                raise EngineDeadError("the engine is shutting down and accepts no new requests")
            updated = asyncio.Event()
            state = self._requests.submit(processed, updated.set, is_repeating=bool(outputs_so_far))
            self._driver.set_timer()
            try:
                finished = False
                async for output in self._repeated(state, snapshot, outputs_so_far):
                    finished = output.finished
                    yield output
                while not finished:
                    await updated.wait()
                    updated.clear()
                    if state.failure is not None:
                        raise state.failure
                    output = snapshot(state)
                    finished = output.finished
                    if finished and (error := state.error_before_output) is not None:
                        raise error
                    yield output
                return
            except QueueFullError as full:
                if begun_at is None:
                    raise
                delay = full.retry_after
            finally:
                self._requests.discard(state)
            await asyncio.sleep(delay)

    async def _repeated(
        self,
        state: RequestState,
        snapshot: Callable[[RequestState], Output],
        outputs: Sequence[Sequence[SequenceOutput]],
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs that another server has of a request, then send what is left of it."""
        for number, output in enumerate(outputs, 1):
            self._requests.outputs.apply(repeated(state.processed, output))
            if state.failure is not None:
                raise state.failure
            yield snapshot(state)
            if number % OUTPUTS_PER_TURN == 0:
                await asyncio.sleep(0)
        if state.is_repeating and not state.finished:  # it may have been aborted meanwhile
            self._requests.send(state)

    async def _prepared(
        self,
        process: Callable[..., ProcessedRequest],
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        may_wait: bool = False,
        **options: Any,
    ) -> ProcessedRequest:
        """Return a checked and tokenized request, which a thread prepares if it is long."""
        await self._driver.wait_until_ready()
        call = functools.partial(process, self._requests.inputs, prompt, params, **options)
        length = length_of(prompt, params) + len(options.get("second_text") or "")
        if isinstance(params, PoolingParams):
            length += self.info.longest_prompt  # it may come before the client's text
        return await self._threads.run(length, call, may_wait=may_wait)

    def _is_idle(self) -> bool:
        return not self._requests.outputs or self._requests.failure is not None


def _count_timeout_from(begun_at: float, timeout: float, processed: ProcessedRequest) -> None:
    """Shorten a request's timeout (seconds) to what is left of it since `begun_at`.

    Raises:
        RequestTimeoutError: nothing is left.
    """
    left = begun_at + timeout - time.monotonic()
    if left <= 0:
        raise RequestTimeoutError(
            f"the request had not been submitted {timeout:g} s after its call; raise the timeout if it has "
            "one of its own, or SchedulerConfig.request_timeout"
        )
    request = processed.core_request
    request.options = dataclasses.replace(request.options, timeout=left)
