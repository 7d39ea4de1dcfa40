"""An engine used by one thread at a time, in the caller's process or its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.config import EngineConfig
from quire.engine.building.runner import ProgressCallback
from quire.engine.core import EngineCore
from quire.engine.kv_events import KVEventPublisher
from quire.engine.loop import EngineLoop
from quire.engine.messages import (
    EngineInfo,
    FromEngine,
    GetStats,
    Ready,
    Reply,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from quire.errors import EngineDeadError
from quire.front.interrupt import deferred_interrupt
from quire.front.live_requests import CLOSED, EngineClient, LiveRequests
from quire.front.process.supervision import EngineSupervisor
from quire.models.checkpoints.engine_files import resolve_files
from quire.scheduling.outputs import SchedulerStats

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer


class InProcessClient:
    """An engine in the caller's process; it runs when `receive` is called.

    Args:
        config: configuration of the engine.
        model_path: directory of the model that `config.model` names.
        on_progress: called with (bytes read, total bytes) while the weights load.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, *, on_progress: ProgressCallback | None = None
    ) -> None:
        self.next_due = None  # the engine only runs when called
        self._outbox: list[FromEngine] = []
        self._publisher = publisher = KVEventPublisher.of(config)
        try:
            core = EngineCore(
                config,
                model_path,
                on_progress=on_progress,
                publish_events=None if publisher is None else publisher.publish,
            )
        except BaseException:
            self._close_publisher()
            raise
        self._loop: EngineLoop | None = EngineLoop(core, self._outbox.append)
        ports = None if publisher is None else publisher.tcp_ports
        self._outbox.append(Ready(msgspec.structs.replace(core.info, kv_events_ports=ports)))

    @property
    def core(self) -> EngineCore:
        """The engine.

        Raises:
            EngineDeadError: the engine has been shut down.
        """
        if self._loop is None:
            raise EngineDeadError(CLOSED)
        return self._loop.core

    def send(self, message: ToEngine) -> None:
        """Handle `message` immediately; after `close`, ignore it."""
        if self._loop is not None:
            with deferred_interrupt():
                self._loop.handle(message)

    def receive(self, timeout: float | None) -> list[FromEngine]:
        """Return the engine's messages; if there are none, run a step first, unless `timeout` is 0."""
        loop = self._loop
        if loop is None:
            raise EngineDeadError(CLOSED)
        if not self._outbox and timeout != 0 and loop.has_work() and not loop.step_and_send():
            time.sleep(loop.stall_wait if timeout is None else min(timeout, loop.stall_wait))
        messages = self._outbox.copy()
        self._outbox.clear()
        return messages

    def close(self) -> None:
        """Abort all requests and release the model and its memory."""
        self.send(Shutdown())
        self._loop = None
        self._close_publisher()

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class Session:
    """An engine, in this process or its own, and its requests, used by one thread at a time.

    Args:
        config: configuration of the engine.
        engine_process: run the engine in its own process; the constructor does not wait for it.
        on_progress: called with (bytes read, total bytes) while the weights load.

    Attributes:
        turn: lock to hold while making requests and receiving outputs; the other methods take it.

    Raises:
        QuireError: the engine cannot be built.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_process: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.turn = threading.RLock()
        model_path, config = resolve_files(config)
        client: EngineClient | EngineSupervisor = (
            EngineSupervisor(config, model_path)
            if engine_process
            else InProcessClient(config, model_path, on_progress=on_progress)
        )
        self.requests = LiveRequests.of(client, config, model_path)
        if isinstance(client, EngineSupervisor):
            client.watch_for(self.requests)
        if on_progress is not None:
            self.requests.on_progress = on_progress

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.requests.tokenizer

    def wait_until_ready(self) -> EngineInfo:
        """Wait until the engine accepts requests.

        Raises:
            QuireError: the engine could not be built.
            EngineDeadError: the engine process has ended.
        """
        with self.turn:
            while not self.requests.is_ready and self.requests.failure is None:
                self.receive_outputs()
            return self.requests.info

    def receive_outputs(self) -> None:
        """Wait for the engine's next outputs; in-process, run one step.

        If the engine ends, every live request fails.

        Raises:
            EngineDeadError: the session has been closed by a signal handler.
        """
        try:
            with deferred_interrupt():  # or a message might be taken but not processed
                self.requests.receive(None)
        except Exception:  # a signal handler may have closed the session
            self.requests.raise_failure()
            raise
        if self.requests.failure is not None:
            self.requests.client.close()

    def stats(self) -> SchedulerStats:
        """Return the current state of the scheduler."""
        stats = self.call(GetStats).stats
        assert stats is not None
        return stats

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; while any block is in use, do nothing and return False."""
        return self.call(ResetPrefixCache).done

    def close(self) -> None:
        """Shut the engine down."""
        with self.turn:
            self.requests.close()

    def call(self, make: Callable[[int], ToEngine]) -> Reply:
        """Send the message that `make` returns for a call id, and return the reply.

        Raises:
            QuireError: the reply is an error, or the engine has ended.
        """
        replies: list[Reply] = []
        with self.turn:
            self.wait_until_ready()
            self.requests.call(make, replies.append)
            while not replies:
                self.requests.raise_failure()
                self.receive_outputs()
        if (error := replies[0].error) is not None:
            raise error.to_exception()
        return replies[0]
