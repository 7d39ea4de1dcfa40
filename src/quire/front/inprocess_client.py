"""An engine in the caller's own process."""

from __future__ import annotations

import time
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.building.runner import ProgressCallback
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.messages import FromEngine, Ready, Shutdown, ToEngine
from quire.errors import EngineDeadError
from quire.front.interrupt import deferred_interrupt


class InProcessClient:
    """An engine in the caller's process; it runs when `receive` is called.

    Args:
        config: of the engine.
        model_path: directory of the model that `config.model` names.
        on_progress: called with (bytes read, total bytes) while the weights load.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, *, on_progress: ProgressCallback | None = None
    ) -> None:
        self._outbox: list[FromEngine] = []
        core = EngineCore(config, model_path, on_progress=on_progress)
        self._loop: EngineLoop | None = EngineLoop(core, self._outbox.append)
        self._outbox.append(Ready(core.info))

    @property
    def next_due(self) -> None:
        """Never: the engine does nothing by itself."""
        return None

    @property
    def core(self) -> EngineCore:
        """The engine.

        Raises:
            EngineDeadError: the engine has been shut down.
        """
        return self._running_loop().core

    def send(self, message: ToEngine) -> None:
        """Handle `message` immediately; after `close`, ignore it."""
        if self._loop is not None:
            with deferred_interrupt():
                self._loop.handle(message)

    def receive(self, timeout: float | None) -> list[FromEngine]:
        """Return the engine's messages; if there are none, run a step first, unless `timeout` is 0."""
        loop = self._running_loop()
        if not self._outbox and timeout != 0 and loop.has_work():
            with deferred_interrupt():
                progressed = loop.step_and_send()
            if not progressed:
                time.sleep(loop.stall_wait if timeout is None else min(timeout, loop.stall_wait))
        messages = self._outbox.copy()
        self._outbox.clear()
        return messages

    def close(self) -> None:
        """Abort all requests and release the model and its memory."""
        self.send(Shutdown())
        self._loop = None

    def _running_loop(self) -> EngineLoop:
        if self._loop is None:
            raise EngineDeadError("the engine has been shut down")
        return self._loop
