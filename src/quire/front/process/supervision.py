"""Supervision of an engine process: when it dies or hangs, another takes its place."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from quire.config import EngineConfig, SupervisionConfig
from quire.engine.messages import FromEngine, Ready, StartupFailed, StepOutputs, ToEngine
from quire.errors import CrashLoopError, EngineDeadError
from quire.front.interrupt import interruptible
from quire.front.process.client import SHUTDOWN_TIMEOUT, EngineProcess
from quire.front.process.standby import StandbyKeeper

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.25
"""Seconds before the second engine in a row is started without any output; the first is started at once."""

LONGEST_BACKOFF = 10.0
"""Seconds that the pause before a start grows to."""

STACKS_TIME = 0.5
"""Seconds that an engine that hangs has to log its stacks before it is killed."""

LATE = 1.0
"""Seconds by which the front looks too late after an engine that is overdue, if it was held up itself."""

START_PATIENCE = 10
"""An engine that starts may be silent for so many times the time that a step may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCrashed:
    """The engine has died, and another one will be `Ready` later; what the first held is lost."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSuspended:
    """The engine has been ended, and another one will be `Ready` when it is resumed."""


class Served(Protocol):
    """The user of an engine."""

    @property
    def waiting_since(self) -> float | None:
        """Since when, on the supervisor's clock, the engine owes a step; None: it owes none."""


class CrashHistory:
    """Remembers engines that died without any output, and says when the next may be started.

    Args:
        config: has the bounds.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._times: deque[float] = deque()

    def note_output(self) -> None:
        """Reset the history: the present engine works."""
        self._times.clear()

    def note_crash(self, now: float) -> float | None:
        """Return the seconds to wait before the next start; None: there have been too many crashes."""
        self._times.append(now)
        while self._times[0] < now - self._config.crash_window:
            self._times.popleft()
        if len(self._times) >= self._config.max_engine_crashes:
            return None
        if len(self._times) == 1:
            return 0.0
        return float(min(FIRST_BACKOFF * 2 ** (len(self._times) - 2), LONGEST_BACKOFF))

    def describe_loop(self) -> str:
        """Return a sentence about the crashes that are too many."""
        config = self._config
        return (
            f"the engine has died {len(self._times)} times within {config.crash_window:g} s (crash_window) "
            f"without any output in between; the limit is max_engine_crashes {config.max_engine_crashes}"
        )


class EngineSupervisor:
    """An engine in a process of its own, replaced by another when it dies or hangs.

    The first engine is not replaced if it dies before it is ready: what it was started with is at fault, and
    whoever started it learns the reason. Not thread-safe. In a fork, which must not end the engine and has no
    thread of zmq's, nothing is sent, and nothing closed.

    Args:
        config: of the engine.
        model_path: directory of the model that `config.model` names.
        read_clock: returns seconds.

    Attributes:
        num_hangs: engines killed because they did not finish a step.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, *, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner = os.getpid()
        self._num_started = 0  # engines after the first
        self.num_hangs = 0
        self._config = config
        self._model_path = model_path
        self._read_clock = read_clock
        self._served: Callable[[], Served | None] = lambda: None
        self._history = CrashHistory(config.supervision)
        self._is_final = config.supervision.recovery == "off"
        self._is_suspended = False
        self._num_resumed = 0  # engines started in place of others that were suspended
        self._has_been_ready = False
        self._num_blocks = 0  # of the KV cache of the first engine; continuations fit into as many
        self._is_ready = False
        self._last_message = read_clock()
        self._start_at: float | None = None  # of the next engine, while there is none
        self._kill_at: float | None = None  # of an engine that hangs
        self._extension: tuple[float, float] | None = None  # (when it was due, when it is due instead)
        self._reason = ""  # why the engine ends, if that is known before it does
        self._events = select.epoll()
        is_standby_wanted = config.supervision.standby_engine and not self._is_final
        self._standby = StandbyKeeper(self._events, is_wanted=is_standby_wanted)
        self._process: EngineProcess | None = EngineProcess(config, model_path)
        self._watch(self._process)

    @property
    def num_restarts(self) -> int:
        """Engines started in place of others that have died."""
        return self._num_started - self._num_resumed

    @property
    def event_fd(self) -> int:
        """Becomes readable when messages may have arrived or the engine has died; then call `receive(0)`."""
        return self._events.fileno()

    @property
    def has_more(self) -> bool:
        """Whether more messages may be there already than `receive` has returned."""
        return self._process is not None and self._process.has_more

    @property
    def next_due(self) -> float | None:
        """When, by the clock, `receive` is to be called even if nothing has arrived; None: never."""
        if self._process is None:
            return self._start_at
        due = self._kill_at if self._kill_at is not None else self._overdue_at()
        if self._standby.start_at is None:
            return due
        return self._standby.start_at if due is None else min(due, self._standby.start_at)

    @property
    def is_suspended(self) -> bool:
        """Whether the engine has ended because of `suspend`."""
        return self._is_suspended and self._process is None

    @property
    def _is_in_fork(self) -> bool:
        return os.getpid() != self._owner

    def suspend(self) -> None:
        """End the engine, and start none before `resume`."""
        self._is_suspended = True
        self._start_at = None
        if self._process is not None:
            self._process.kill()

    def resume(self) -> None:
        """Start another engine in place of one that was suspended."""
        assert self.is_suspended
        self._is_suspended = False
        self._num_resumed += 1
        self._start_at = self._read_clock()

    def watch_for(self, served: Served) -> None:
        """Take the engine for hung when it lets `served` wait for too long.

        Holds no strong reference: the engine ends with the last user of this object.
        """
        self._served = weakref.ref(served)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine; never blocks. While there is no engine, the message is lost."""
        if self._process is not None and not self._is_in_fork:
            self._process.send(message)

    def receive(self, timeout: float | None) -> list[FromEngine | EngineCrashed | EngineSuspended]:
        """Return all messages that have arrived, waiting at most `timeout` seconds for the first.

        Starts and kills engines where that is due.

        Raises:
            CrashLoopError: too many engines have died; none is started any more.
            EngineDeadError: the engine has died, and is not replaced; no messages are left. Or it is that of
                another process, of which this is a fork.
        """
        if self._is_in_fork:
            raise EngineDeadError(
                f"the engine is of the process {self._owner}, and this one, a fork of it, cannot use it; "
                "make another here"
            )
        if self._process is None:
            return self._start_when_due(timeout)
        self._standby.attend(self._read_clock)
        try:
            messages = self._process.receive(timeout)
        except EngineDeadError as error:
            return [self._bury(self._process, str(error))]
        for message in messages:
            self._note(message)
        if not messages:  # or the one that is waited for may be among them
            self._end_if_hung(self._process)
        return [message for message in messages if not self._is_kept_back(message)]

    def retire(self) -> None:
        """Start no other engine, neither now nor when the present one ends."""
        self._is_final = True
        self._is_suspended = False
        self._start_at = None
        self._standby.close()

    def close(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """Tell the engine to end, kill it after `timeout` seconds, and clean up."""
        if self._is_in_fork:
            return
        self.retire()
        if self._process is not None:
            self._forget(self._process, timeout)

    # -- death and replacement -----------------------------------------------------------------------------

    def _bury(self, process: EngineProcess, how: str) -> EngineCrashed | EngineSuspended:
        """Clean up after an engine that has died, and plan the next; raise if there is to be none."""
        reason = self._reason or how
        self._forget(process)
        if self._is_suspended:
            return EngineSuspended()
        if self._is_final or not self._has_been_ready:
            self._standby.close()
            raise EngineDeadError(reason)
        return self._plan_start(reason)

    def _plan_start(self, reason: str) -> EngineCrashed:
        now = self._read_clock()
        delay = self._history.note_crash(now)
        if delay is None:
            self._standby.close()
            raise CrashLoopError(f"{self._history.describe_loop()}; the last reason: {reason}")
        self._start_at = now + delay
        logger.error("the engine has died and is started again in %g s: %s", delay, reason)
        return EngineCrashed(reason)

    def _start_when_due(self, timeout: float | None) -> list[FromEngine | EngineCrashed | EngineSuspended]:
        if self._is_suspended:
            with interruptible():
                self._events.poll(timeout)
            self._standby.attend(self._read_clock)
            return []
        if self._start_at is None:
            raise EngineDeadError("the engine has been shut down")
        wait = self._start_at - self._read_clock()
        if wait > 0 and timeout != 0:
            with interruptible():
                time.sleep(wait if timeout is None else min(wait, timeout))
            wait = self._start_at - self._read_clock()
        if wait > 0:
            return []
        self._num_started += 1
        standby = self._standby.take()
        try:
            process = EngineProcess(self._config_of_restart(), self._model_path, self._num_blocks, standby)
        except Exception as error:  # no process, no memory, no descriptor: later there may be
            logger.exception("the engine process could not be started")
            return [self._plan_start(f"the engine process could not be started: {error!r}")]
        self._start_at, self._process, self._last_message = None, process, self._read_clock()
        self._watch(process)
        return []

    def _config_of_restart(self) -> EngineConfig:
        """Return the configuration with a file of its own for each engine's recording."""
        path = self._config.record_path
        if not path:
            return self._config
        return dataclasses.replace(self._config, record_path=f"{path}.{self._num_started}")

    def _watch(self, process: EngineProcess) -> None:
        for descriptor in (process.message_fd, process.death_fd):
            self._events.register(descriptor, select.EPOLLIN)

    def _forget(self, process: EngineProcess, timeout: float = 0.0) -> None:
        for descriptor in (process.message_fd, process.death_fd):
            self._events.unregister(descriptor)
        self._process = None
        self._is_ready, self._kill_at, self._extension, self._reason = False, None, None, ""
        process.close(timeout)

    # -- messages and hangs --------------------------------------------------------------------------------

    def _note(self, message: FromEngine) -> None:
        self._last_message = self._read_clock()
        match message:
            case Ready(info):
                self._is_ready = self._has_been_ready = True
                self._num_blocks = self._num_blocks or info.num_blocks
                self._standby.plan(self._last_message)
            case StartupFailed(error) if self._has_been_ready:
                self._reason = f"the engine could not be built: {error.message}"
            case StepOutputs(outputs) if any(output.new_token_ids or output.pooled for output in outputs):
                self._history.note_output()

    def _is_kept_back(self, message: FromEngine) -> bool:
        """Whether nobody else is to see a message: an engine that is a replacement dies of it."""
        return isinstance(message, StartupFailed) and self._has_been_ready

    def _hangs_at(self) -> float | None:
        """Return when the engine is to be taken for hung unless something arrives; None: never."""
        limit = self._config.supervision.watchdog_timeout
        if not limit:
            return None
        if not self._is_ready:
            return self._last_message + START_PATIENCE * limit
        served = self._served()
        since = None if served is None else served.waiting_since
        if since is None or self._process is None:
            return None
        return max(since, self._process.acknowledged_at) + limit  # before that it may have had to wait

    def _overdue_at(self) -> float | None:
        """Return `_hangs_at()`, or the later time that takes its place."""
        due = self._hangs_at()
        if self._extension is not None and self._extension[0] == due:
            return self._extension[1]
        return due

    def _was_held_up(self, now: float) -> bool:
        """Whether this process looks so late that it was stopped or blocked; then the engine gets more time.

        Its messages may have come meanwhile, or it has waited until its messages would be read. Only once: an
        engine that hangs is noticed also by a process that is always late.
        """
        due = self._hangs_at()
        is_extended = self._extension is not None and self._extension[0] == due
        if due is None or now - due <= LATE or is_extended:
            return False
        self._extension = (due, now + self._config.supervision.watchdog_timeout)
        return True

    def _end_if_hung(self, process: EngineProcess) -> None:
        now = self._read_clock()
        if self._kill_at is not None:
            if now >= self._kill_at:
                process.kill()
                self._kill_at = now + SHUTDOWN_TIMEOUT  # until its death is noticed
            return
        due = self._overdue_at()
        if due is None or now < due or self._was_held_up(now):
            return
        self.num_hangs += 1
        self._kill_at = now + STACKS_TIME
        self._reason = self._describe_hang(process)
        logger.error("%s; its stacks follow, then it is killed", self._reason)
        process.log_stacks()

    def _describe_hang(self, process: EngineProcess) -> str:
        limit = self._config.supervision.watchdog_timeout
        if not self._is_ready:
            silence = START_PATIENCE * limit
            return f"the engine process {process.pid}, which starts, has been silent for {silence:g} s"
        return (
            f"the engine process {process.pid} has requests, but has not finished a step for {limit:g} s "
            "(watchdog_timeout)"
        )
