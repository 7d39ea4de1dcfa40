"""Prefill of a prompt on one engine, for decoding on another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import urllib.parse
from collections.abc import Iterator

import msgspec

from quire.cluster.engines.calls import EngineCalls, PromptKV
from quire.cluster.engines.metrics import Purpose
from quire.cluster.engines.registry import PREFILLERS, Engine
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.cluster.prompts import GenerationBody
from quire.config import RouterConfig
from quire.server.wire.answers import KVTransferAddress

logger = logging.getLogger(__name__)

MAX_PREFILLS = 2
"""Maximum number of prefill engines tried for one prompt."""

_TRANSFERS = "/v1/kv_transfers/"
_BUSY = 429
_CLIENTS_FAULT = range(400, 500)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


class _Transfer(msgspec.Struct):
    transfer_id: str = ""


class PrefillFailedError(Exception):
    """The prefill that a decode engine waits for has failed."""


@dataclasses.dataclass(slots=True)
class Prefill:
    """The prefill of a prompt on another engine, under way or done.

    Args:
        engine: the prefill engine.
        params: where its KV is, for the decode engine.
        computing: the request to the prefill engine, which returns whether it succeeded; None: it has.

    Attributes:
        is_taken: whether the decode engine has answered, and so releases the KV itself.
    """

    engine: Engine
    params: msgspec.Raw
    computing: asyncio.Task[bool] | None = None
    is_taken: bool = False

    @property
    def is_held(self) -> bool:
        """Whether the prefill engine holds KV that no decode engine will read."""
        return not self.is_taken and (self.computing is None or _was_computed(self.computing))

    @property
    def transfer_id(self) -> str:
        """The transfer id of its KV; empty: it has none."""
        try:
            return msgspec.json.decode(self.params, type=_Transfer).transfer_id
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return ""

    @contextlib.contextmanager
    def ending(self, waiting: asyncio.Timeout) -> Iterator[None]:
        """Expire a timeout as soon as the prefill has failed."""

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
            is_over = True  # the event loop may have queued a call already
            self.computing.remove_done_callback(note_end)


class Prefills:
    """Attempts to prefill the prompt of one request.

    Args:
        calls: sends requests to engines.
        config: the router's configuration.
        asked: the request to answer, from which the prefill request is made.
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
        self._begun: list[Prefill] = []

    async def next(self) -> Prefill | None:
        """Return the next attempt; None if no other engine should be tried.

        With overlapped transfers, this returns when the prefill has begun, otherwise when it is done.
        """
        while self._may_help and len(self._tried) < MAX_PREFILLS:
            prompt = self._generation.prompt
            engine = self._calls.engines.choose(PREFILLERS, prompt, excluded=self._tried)
            if engine is None:
                break
            self._tried.append(engine)
            prefill = await self._prefill(engine)
            if prefill is not None:
                self._begun.append(prefill)
                return prefill
        if self._may_help:
            self._calls.metrics.fallbacks.inc()
        return None

    async def close(self) -> None:
        """Release held KV, and cancel prefills that are still running."""
        for prefill in self._begun:
            if prefill.is_held:
                self._release(prefill)
        computing = [prefill.computing for prefill in self._begun if prefill.computing is not None]
        for task in computing:
            task.cancel()
        await asyncio.gather(*computing, return_exceptions=True)

    def _release(self, prefill: Prefill) -> None:
        """Free KV on a prefill engine, as the decode engine has refused or was never asked."""
        transfer_id = prefill.transfer_id
        if not transfer_id:
            return
        asked = dataclasses.replace(
            self._asked,
            method="DELETE",
            path=_TRANSFERS + urllib.parse.quote(transfer_id, safe=""),
            headers=self._asked.headers_for("release"),
            timeout=self._config.connect_timeout,
        )
        self._calls.releases.begin(prefill.engine, asked)

    async def _prefill(self, engine: Engine) -> Prefill | None:
        """Begin a prefill, or wait until it is done; None: it failed."""
        address = engine.kv_address(self._generation.prompt.model)
        if self._config.kv_transfer == "overlapped" and address is not None:
            return self._begin(engine, address)
        params = await self._params_of(engine, {"do_remote_decode": True})
        return None if params is None else Prefill(engine, params)

    def _begin(self, engine: Engine, address: KVTransferAddress) -> Prefill:
        transfer_id = secrets.token_hex(16)
        reads = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": address.host,
            "remote_port": address.port,
        }

        async def compute() -> bool:
            return (
                await self._params_of(engine, {"do_remote_decode": True, "transfer_id": transfer_id})
                is not None
            )

        return Prefill(engine, msgspec.Raw(msgspec.json.encode(reads)), asyncio.create_task(compute()))

    async def _params_of(self, engine: Engine, params: dict[str, object]) -> msgspec.Raw | None:
        """Have an engine compute the prompt; return where its KV is, or None if that failed."""
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
                self._may_help = False  # the answering engine reports the error to the client
            return None
        try:
            params = msgspec.json.decode(answer.body, type=_PrefillAnswer).kv_transfer_params
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            params = msgspec.Raw(b"")
        if bytes(params).startswith(b"{"):
            return params
        logger.warning("%s returned no kv_transfer_params; does it have --role prefill?", engine.url)
        return None


def _was_computed(computing: asyncio.Task[bool]) -> bool:
    return computing.done() and not computing.cancelled() and computing.result()
