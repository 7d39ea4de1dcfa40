"""The engine's side of the conversation: messages in, messages out, whatever carries them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequests,
    EngineCoreRequest,
    ErrorInfo,
    FromEngine,
    GetStats,
    Reply,
    RequestRefused,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    StopRequests,
    ToEngine,
)
from quire.errors import QuireError
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import RequestStatus

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.1
"""Seconds between statistics, which are also the engine's proof of life."""


class EngineLoop:
    """Answers messages and advances the core.

    Args:
        core: the engine.
        send: takes each message for the front.
    """

    def __init__(self, core: EngineCore, send: Callable[[FromEngine], None]) -> None:
        self.core = core
        self.stopped = False
        self._send = send
        self._stats_due = 0.0
        self._stalled = False

    def handle(self, message: ToEngine) -> None:
        """Act on one message from the front."""
        match message:
            case EngineCoreRequest():
                self._add(message)
            case AbortRequests(sequence_ids):
                self._send_outputs(self.core.finish(sequence_ids, RequestStatus.FINISHED_ABORTED))
            case StopRequests(sequence_ids):
                self.core.finish(sequence_ids, RequestStatus.FINISHED_STOPPED)
            case GetStats(call_id):
                self._send(Reply(call_id, stats=self.core.stats()))
            case ResetPrefixCache(call_id):
                self._send(Reply(call_id, done=self.core.reset_prefix_cache()))
            case Shutdown():
                self._send_outputs(self.core.shutdown())
                self.stopped = True

    def step(self) -> bool:
        """Run one step and send its outputs; return whether anything was done."""
        outputs, progressed = self.core.step()
        idle = not self.core.has_unfinished_requests()
        now = time.monotonic()
        if idle or (progressed and now >= self._stats_due):
            self._stats_due = now + STATS_INTERVAL
            self._send(StepOutputs(outputs, self.core.stats()))
        else:
            self._send_outputs(outputs)
        if not (progressed or self._stalled or idle):
            logger.error("requests are unfinished but none could be scheduled: %s", self.core.stats())
        self._stalled = not progressed
        return progressed

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self.core.add(request)
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a request could not be queued")
            self._send(RequestRefused(request.sequence_ids, ErrorInfo.of(error)))

    def _send_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        if outputs:
            self._send(StepOutputs(outputs))
