"""Having a prompt computed by one engine, so that another can go on with its KV."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Iterator

import msgspec

from quire.cluster.engine_calls import EngineCalls, PromptKV
from quire.cluster.engines import PREFILLERS, Engine
from quire.cluster.metrics import Purpose
from quire.cluster.prompts import GenerationBody
from quire.cluster.upstream import Answer, EngineRequest, EngineRequestError
from quire.config import RouterConfig

logger = logging.getLogger(__name__)

MAX_PREFILLS = 2
"""Prefill engines that one prompt is sent to at most, one after the other."""

_BUSY = 429
_CLIENTS_FAULT = range(400, 500)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


class PrefillFailedError(Exception):
    """The prompt that an engine waits for is not computed any more."""


@dataclasses.dataclass(slots=True)
class Prefill:
    """A prompt that another engine computes, or has computed.

    Args:
        params: where its KV is, for the engine that goes on with it.
        computing: the request to the engine that computes it, which is true if it was; None: it was.
    """

    params: msgspec.Raw
    computing: asyncio.Task[bool] | None = None

    @contextlib.contextmanager
    def ending(self, waiting: asyncio.Timeout) -> Iterator[None]:
        """Have a timeout expire as soon as it is certain that the prompt will not be computed."""

        is_over = False

        def note_end(computing: asyncio.Task[bool]) -> None:
            if is_over or waiting.expired() or computing.cancelled() or computing.result():
                return
            waiting.reschedule(asyncio.get_running_loop().time())

        if self.computing is None:
            yield
            return
        self.computing.add_done_callback(note_end)
        try:
            yield
        finally:
            is_over = True  # a call that the loop has queued already cannot be taken back
            self.computing.remove_done_callback(note_end)


class Prefills:
    """The attempts to have the prompt of one request computed.

    Args:
        calls: to engines.
        config: of the router.
        asked: the request to answer; the one to compute its prompt is made of that.
        generation: its body.
    """

    def __init__(
        self, calls: EngineCalls, config: RouterConfig, asked: EngineRequest, generation: GenerationBody
    ) -> None:
        self._calls = calls
        self._config = config
        self._asked = asked
        self._generation = generation
        self._tried: list[Engine] = []
        self._may_help = True
        self._computing: list[asyncio.Task[bool]] = []

    async def next(self) -> Prefill | None:
        """Return the next attempt; None if no more engine should be asked.

        If KV is read while it is computed, this returns when the prompt is on its way, otherwise when it has
        been computed.
        """
        while self._may_help and len(self._tried) < MAX_PREFILLS:
            prompt = self._generation.prompt
            engine = self._calls.engines.choose(PREFILLERS, prompt, excluded=self._tried)
            if engine is None:
                break
            self._tried.append(engine)
            if self._config.kv_transfer == "overlapped" and engine.kv_address is not None:
                return self._begin(engine, engine.kv_address)
            params = await self._params_of(engine, {"do_remote_decode": True})
            if params is not None:
                return Prefill(params)
        if self._may_help:
            self._calls.metrics.fallbacks.inc()
        return None

    async def close(self) -> None:
        """Cancel what is still being computed: nobody waits for it."""
        for computing in self._computing:
            computing.cancel()
        await asyncio.gather(*self._computing, return_exceptions=True)

    def _begin(self, engine: Engine, address: tuple[str, int]) -> Prefill:
        transfer_id = secrets.token_hex(16)
        host, port = address
        reads = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": host,
            "remote_port": port,
        }

        async def compute() -> bool:
            return (
                await self._params_of(engine, {"do_remote_decode": True, "transfer_id": transfer_id})
                is not None
            )

        self._computing.append(asyncio.create_task(compute()))
        return Prefill(msgspec.Raw(msgspec.json.encode(reads)), self._computing[-1])

    async def _params_of(self, engine: Engine, params: dict[str, object]) -> msgspec.Raw | None:
        """Have an engine compute the prompt; return where the KV is, or None if the engine has not got it."""
        asked = dataclasses.replace(
            self._asked,
            body=self._generation.for_prefill(params),
            headers=self._asked.headers_for("prefill"),
            timeout=self._config.prefill_timeout,
        )
        try:
            async with self._calls.answer(
                engine, Purpose.PREFILL, self._generation.prompt, PromptKV.COMPUTED, asked
            ) as answer:
                return self._params_in(engine, answer)
        except EngineRequestError as error:
            logger.warning("%s", error)
            return None

    def _params_in(self, engine: Engine, answer: Answer) -> msgspec.Raw | None:
        if answer.status != 200:
            logger.warning("%s refused a prefill with status %d", engine.url, answer.status)
            if answer.status in _CLIENTS_FAULT and answer.status != _BUSY:
                self._may_help = False  # the engine that answers will tell the client
            return None
        try:
            params = msgspec.json.decode(answer.body, type=_PrefillAnswer).kv_transfer_params
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            params = msgspec.Raw(b"")
        if bytes(params).startswith(b"{"):
            return params
        logger.warning("%s returned no kv_transfer_params; does it have --role prefill?", engine.url)
        return None
