"""The engine's loop: handle messages from the front, run a step, send its outputs."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequests,
    EngineCoreRequest,
    ErrorInfo,
    Explain,
    FromEngine,
    GetStats,
    ReleaseKV,
    Reply,
    RequestRefused,
    ResetPrefixCache,
    RestoreKV,
    SaveKV,
    SetPauseState,
    Shutdown,
    StepOutputs,
    StopRequests,
    ToEngine,
)
from quire.errors import QuireError
from quire.scheduling.interface import PauseState
from quire.scheduling.outputs import EngineCoreOutput, SchedulerStats
from quire.status import FinishReason, RequestStatus

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.1
"""Seconds between statistics, which also serve as heartbeats."""

AWAITING_WAIT = 0.002
"""Seconds to pause at first while nothing can run until a grammar is compiled, or KV is found or loaded."""

AWAITING_SHARE = 8
"""While that lasts, the pause is so small a part of the time already waited: looking costs a core."""

MAX_AWAITING_WAIT = 0.02
"""Seconds that the pause grows to."""

STALL_WAIT = 0.1
"""Seconds to pause during any other stall."""

MAX_IDLE_WAIT = 3600.0
"""Seconds to wait at most for a message; pins may last for longer than sockets can wait."""

STALL_NOTICE = 5.0
"""Seconds after which the reason for a legitimate stall is logged; a first grammar takes one or two."""

EXPLAIN_TIME = 0.02
"""Seconds between two steps for explanations: with a long queue, each takes a millisecond or more."""


class MessageSource(Protocol):
    """Source of messages from the front."""

    @property
    def has_room(self) -> bool:
        """Whether the front keeps up with messages; if not, it sends a message once it has."""

    def deliver(self, handle: Callable[[ToEngine], None], *, wait: int | None) -> None:
        """Handle what has arrived, or a turn's worth of it, waiting at most `wait` milliseconds for it."""


class EngineLoop:
    """Handles messages and runs steps, alternately.

    Args:
        core: the engine.
        send: sends a message to the front.
        clock: returns seconds.
    """

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[FromEngine], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.stopped = False
        self.stall_wait = STALL_WAIT
        self._send = send
        self._clock = clock
        self._stats_due = 0.0
        self._unanswered: dict[int, tuple[Future[Any], Callable[[int, Any], Reply]]] = {}
        self._awaiting_since: float | None = None
        self._stalled_since: float | None = None
        self._stall_is_logged = False

    def run(self, messages: MessageSource) -> None:
        """Handle messages and run steps until `Shutdown`.

        Blocks only if there is nothing to do, or until a front that is behind has caught up.

        Raises:
            EngineDeadError: a rank has failed.
        """
        wait: int | None = None
        while not self.stopped:
            messages.deliver(self.handle, wait=wait)
            self.core.raise_rank_failure()
            wait = None
            if self.stopped or not messages.has_room:
                continue
            if self.has_work():
                wait = 0 if self.step_and_send() else math.ceil(self.stall_wait * 1000)
            elif (left := self._time_until_due()) is not None:
                wait = math.ceil(min(left, MAX_IDLE_WAIT) * 1000)

    def has_work(self) -> bool:
        """Whether a step has anything to do, or a call is still to be answered."""
        return self.core.has_requests() or bool(self._unanswered) or self._time_until_due() == 0

    def _time_until_due(self) -> float | None:
        """Return the seconds until a step has something to do without any request; None: it never has."""
        due = self.core.next_due()
        return None if due is None else max(0.0, due - self._clock())

    def handle(self, message: ToEngine) -> None:
        """Handle one message from the front; after `Shutdown`, ignore all."""
        if self.stopped:
            return
        match message:
            case EngineCoreRequest():
                try:
                    self.core.add(message)
                except Exception as error:
                    if not isinstance(error, QuireError):
                        logger.exception("a request could not be queued")
                    self._send(RequestRefused(message.sequence_ids, ErrorInfo.of(error)))
            case AbortRequests(sequence_ids):
                self._send_outputs(self.core.withdraw(sequence_ids, RequestStatus.FINISHED_ABORTED))
            case StopRequests(sequence_ids):
                self.core.withdraw(sequence_ids, RequestStatus.FINISHED_STOPPED)
            case ReleaseKV(transfer_id):
                self.core.release_kv(transfer_id)
            case Shutdown():
                self._send_outputs(self.core.shutdown())
                self.stopped = True
            case _:
                self._handle_call(message)

    def _handle_call(self, message: ToEngine) -> None:
        """Handle a message that is answered with a `Reply`."""
        match message:
            case GetStats(call_id):
                self._answer(call_id, lambda: Reply(call_id, stats=self.core.stats()))
            case ResetPrefixCache(call_id):
                self._answer(call_id, lambda: Reply(call_id, done=self.core.reset_prefix_cache()))
            case SetPauseState(call_id, pause_state):
                self._answer(call_id, lambda: self._set_pause_state(call_id, pause_state))
            case Explain(call_id, sequence_ids):
                self._answer(call_id, lambda: Reply(call_id, texts=self._explanations(sequence_ids)))
            case SaveKV(call_id, path, token_ids, cache_salt):
                self._answer_later(
                    call_id, lambda: self.core.save_kv(Path(path), token_ids, cache_salt), _saved
                )
            case RestoreKV(call_id, path, cache_salt):
                self._answer_later(call_id, lambda: self.core.restore_kv(Path(path), cache_salt), _restored)

    def _explanations(self, sequence_ids: Sequence[str]) -> list[str]:
        """Explain the first sequences: as many as there is time for, and at least one."""
        texts: list[str] = []
        ends = self._clock() + EXPLAIN_TIME
        for sequence_id in sequence_ids:
            texts.append(self.core.explain(sequence_id))
            if self._clock() >= ends:
                break
        return texts

    def _set_pause_state(self, call_id: int, pause_state: PauseState) -> Reply:
        self.core.scheduler.set_pause_state(pause_state)
        return Reply(call_id)

    def step_and_send(self) -> bool:
        """Run one step and send its outputs; return whether anything was done.

        If not, the next step is due after `stall_wait` seconds, or with the next message.
        """
        if self._unanswered:
            self._send_answers()
        outputs, progressed = self.core.step()
        idle = not self.core.has_unfinished_requests()
        self._send_outputs(outputs, self._stats_after_step(progressed=progressed, idle=idle))
        if progressed or idle:
            self.stall_wait, self._stalled_since, self._stall_is_logged = STALL_WAIT, None, False
            self._awaiting_since = None
        return progressed

    def _stats_after_step(self, *, progressed: bool, idle: bool) -> SchedulerStats | None:
        """Return the statistics to send with a step's outputs, if any are due; empty ones, if that fails."""
        try:
            now = self._clock()
            is_legitimate = progressed or idle or self._note_stall(now)
            if not idle and not (is_legitimate and now >= self._stats_due):
                return None
            self._stats_due = now + STATS_INTERVAL
            return self.core.stats()
        except Exception:  # the outputs of the step are not to be lost
            logger.exception("could not collect the statistics of a step")
            return SchedulerStats() if progressed or idle else None

    def _answer(self, call_id: int, make_reply: Callable[[], Reply]) -> None:
        """Answer a call; an exception is its answer, and does not end the engine."""
        try:
            self._send(make_reply())
        except Exception as error:
            self._send(_failed(call_id, error))

    def _answer_later(
        self, call_id: int, begin: Callable[[], Future[Any]], reply: Callable[[int, Any], Reply]
    ) -> None:
        """Start a long-running call; its answer is sent when it has ended."""
        try:
            self._unanswered[call_id] = begin(), reply
        except Exception as error:
            self._send(_failed(call_id, error))

    def _send_answers(self) -> None:
        ended = [call_id for call_id, (future, _) in self._unanswered.items() if future.done()]
        for call_id in ended:
            future, reply = self._unanswered.pop(call_id)
            error = future.exception()
            if error is None:
                self._answer(call_id, functools.partial(reply, call_id, future.result()))
            else:
                self._send(_failed(call_id, error))

    def _note_stall(self, now: float) -> bool:
        """Set how long to pause, and return whether the stall is legitimate.

        The reason is logged once per stall; immediately, if the stall is not legitimate. Loads of KV are
        what the engine does then, and end by themselves.
        """
        core, stats = self.core, self.core.stats()
        self.stall_wait = self._pause(now, is_awaiting=stats.num_awaiting > 0)
        if self._stalled_since is None or stats.num_loading:
            self._stalled_since = now
        is_legitimate = core.may_stall()
        if not self._stall_is_logged and (not is_legitimate or now - self._stalled_since >= STALL_NOTICE):
            self._stall_is_logged = True
            level = logging.WARNING if is_legitimate else logging.ERROR
            logger.log(level, "no unfinished request can be scheduled: %s; %s", core.explain_oldest(), stats)
        return is_legitimate

    def _pause(self, now: float, *, is_awaiting: bool) -> float:
        """Return how many seconds to pause in a stall."""
        since, self._awaiting_since = self._awaiting_since, None
        if is_awaiting:
            self._awaiting_since = now if since is None else since
            share = (now - self._awaiting_since) / AWAITING_SHARE
            return min(max(AWAITING_WAIT, share), MAX_AWAITING_WAIT)
        # What the last step waited for may have come with this one, which the next can use at once.
        return STALL_WAIT if since is None else AWAITING_WAIT

    def _send_outputs(self, outputs: list[EngineCoreOutput], stats: SchedulerStats | None = None) -> None:
        if not outputs and stats is None:
            return
        try:
            self._send(StepOutputs(outputs, stats))
        except Exception:
            logger.exception("the outputs of a step cannot be sent together; each is sent by itself")
            for output in outputs:
                self._send_output(output)
            self._send_stats(stats)

    def _send_output(self, output: EngineCoreOutput) -> None:
        """Send one output; if that fails, end its sequence."""
        try:
            self._send(StepOutputs([output]))
        except Exception as error:
            logger.exception("an output of request %r cannot be sent; the request ends", output.request_id)
            self.core.finish([output.request_id], RequestStatus.FINISHED_ERROR)
            message = f"an output of this request cannot be sent: {ErrorInfo.of(error).message}"
            end = EngineCoreOutput(output.request_id, [], finish_reason=FinishReason.ERROR, error=message)
            self._send(StepOutputs([end]))

    def _send_stats(self, stats: SchedulerStats | None) -> None:
        """Send statistics; empty ones, which are a sign of life, too, if they cannot be sent."""
        if stats is None:
            return
        try:
            self._send(StepOutputs([], stats))
        except Exception:
            logger.exception("the statistics of a step cannot be sent")
            self._send(StepOutputs([], SchedulerStats()))


def _failed(call_id: int, error: BaseException) -> Reply:
    if not isinstance(error, QuireError):
        logger.error("a call could not be answered", exc_info=error)
    return Reply(call_id, done=False, error=ErrorInfo.of(error))


def _saved(call_id: int, result: tuple[int, bool]) -> Reply:
    num_tokens, is_saved = result
    return Reply(call_id, done=is_saved, num_tokens=num_tokens)


def _restored(call_id: int, token_ids: list[int]) -> Reply:
    return Reply(call_id, token_ids=token_ids)
