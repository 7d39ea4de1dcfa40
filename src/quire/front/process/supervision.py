"""Supervision of an engine process: one that dies or hangs is replaced."""

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

import msgspec

from quire.config import EngineConfig, SupervisionConfig
from quire.engine.kv_events import KVEventPublisher
from quire.engine.messages import FromEngine, KVEvents, Ready, StartupFailed, StepOutputs, ToEngine
from quire.errors import CrashLoopError, EngineDeadError
from quire.front.interrupt import interruptible
from quire.front.process.client import SHUTDOWN_TIMEOUT, EngineProcess
from quire.front.process.standby import StandbyKeeper
from quire.kv.blocks.events import AllBlocksCleared

logger = logging.getLogger(__name__)

INITIAL_BACKOFF = 0.25
"""Back-off in seconds after the second crash in a row without output; the first has none."""

MAX_BACKOFF = 10.0
"""Maximum back-off in seconds."""

STACKS_TIME = 0.5
"""Seconds for a hanging engine to log its stacks before it is killed."""

LATE = 1.0
"""If the front checks an overdue engine this many seconds late, it was blocked itself."""

START_PATIENCE = 10
"""Multiple of the watchdog timeout for which a starting engine may be silent."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCrashed:
    """The engine has died with its state, and another one will be `Ready` later."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSuspended:
    """The engine has been ended, and another one will be `Ready` when it is resumed."""


class EngineUser(Protocol):
    """The user of an engine."""

    @property
    def waiting_since(self) -> float | None:
        """Since when, on the supervisor's clock, a step is due; None: none is."""


class CrashHistory:
    """Remembers engines that died without output, and the back-off before the next start.

    Args:
        config: the bounds.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._times: deque[float] = deque()

    def note_output(self) -> None:
        """Reset the history: the current engine works."""
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
        return float(min(INITIAL_BACKOFF * 2 ** (len(self._times) - 2), MAX_BACKOFF))

    def describe_loop(self) -> str:
        """Return an error message about too many crashes."""
        config = self._config
        return (
            f"the engine has died {len(self._times)} times within {config.crash_window:g} s (crash_window) "
            f"without any output in between; the limit is max_engine_crashes {config.max_engine_crashes}"
        )


class EngineSupervisor:
    """An engine in a process of its own, replaced by another when it dies or hangs.

    It publishes the KV events of all its engines, so that addresses and numbers stay, and what a dead one had
    cached is cleared.

    The first engine is not replaced if it dies before it is ready, as its configuration is at fault: the
    caller gets the reason. Not thread-safe. In a fork, which must not end the engine and lacks zmq's threads,
    nothing is sent and nothing is closed.

    Args:
        config: configuration of the engine.
        model_path: directory of the model that `config.model` names.
        read_clock: returns seconds.

    Attributes:
        num_hangs: engines killed because they did not finish a step.

    Raises:
        ConfigError: an address for KV events cannot be bound, or no process can be connected.
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
        self._user: Callable[[], EngineUser | None] = lambda: None
        self._history = CrashHistory(config.supervision)
        self._is_final = config.supervision.recovery == "off"
        self._is_suspended = False
        self._num_resumed = 0  # engines started after a suspension
        self._has_been_ready = False
        self._num_blocks = 0  # KV blocks of the first engine, which the next ones need for continuations
        self._is_ready = False
        self._last_message = read_clock()
        self._start_at: float | None = None  # of the next engine, while there is none
        self._kill_at: float | None = None  # a hanging engine
        self._extension: tuple[float, float] | None = None  # (when it was due, when it is due instead)
        self._reason = ""  # why the engine ends, if that is known before it does
        self._events = select.epoll()
        is_standby_wanted = config.supervision.standby_engine and not self._is_final
        self._standby = StandbyKeeper(self._events, is_wanted=is_standby_wanted)
        self._publisher = KVEventPublisher.of(config)
        if self._publisher is not None:
            weakref.finalize(self, _close, os.getpid(), self._publisher)
        self._process: EngineProcess | None = EngineProcess(config, model_path)
        self._watch(self._process)

    @property
    def num_restarts(self) -> int:
        """Number of engines started to replace others that died."""
        return self._num_started - self._num_resumed

    @property
    def event_fd(self) -> int:
        """Becomes readable when messages may have arrived or the engine has died; then call `receive(0)`."""
        return self._events.fileno()

    @property
    def has_more(self) -> bool:
        """Whether more messages may have arrived than `receive` has returned."""
        return self._process is not None and self._process.has_more

    @property
    def next_due(self) -> float | None:
        """When, by the clock, `receive` must be called even if nothing has arrived; None: never."""
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
        """End the engine, and start no other until `resume`."""
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

    def watch_for(self, user: EngineUser) -> None:
        """Consider the engine hung when it keeps `user` waiting for too long.

        Holds no strong reference: the engine ends with the last user of this object.
        """
        self._user = weakref.ref(user)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine; never blocks. While there is no engine, the message is lost."""
        if self._process is not None and not self._is_in_fork:
            self._process.send(message)

    def receive(self, timeout: float | None) -> list[FromEngine | EngineCrashed | EngineSuspended]:
        """Return all messages that have arrived, waiting at most `timeout` seconds for the first.

        Starts and kills engines where that is due.

        Raises:
            CrashLoopError: too many engines have died; no other is started.
            EngineDeadError: the engine has died and is not replaced, and no messages are left; or this
                process is a fork of the engine's owner.
        """
        if self._is_in_fork:
            raise EngineDeadError(
                f"the engine belongs to process {self._owner}, and this fork of it cannot use it; make "
                "another one here"
            )
        if self._process is None:
            return self._start_when_due(timeout)
        self._standby.maintain(self._read_clock)
        try:
            messages = self._process.receive(timeout)
        except EngineDeadError as error:
            return [self._note_death(self._process, str(error))]
        for message in messages:
            self._note(message)
        if not messages:  # else the one awaited may be among them
            self._end_if_hung(self._process)
        return [message for message in messages if not self._is_internal(message)]

    def retire(self) -> None:
        """Never start another engine."""
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
        if self._publisher is not None:
            self._publisher.close()

    # -- death and replacement -----------------------------------------------------------------------------

    def _note_death(self, process: EngineProcess, how: str) -> EngineCrashed | EngineSuspended:
        """Clean up after a dead engine, and plan the next start; raise if there is none."""
        reason = self._reason or how
        self._forget(process)
        if self._publisher is not None:
            self._publisher.publish([AllBlocksCleared()])
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
        logger.error("the engine has died and is restarted in %g s: %s", delay, reason)
        return EngineCrashed(reason)

    def _start_when_due(self, timeout: float | None) -> list[FromEngine | EngineCrashed | EngineSuspended]:
        if self._is_suspended:
            with interruptible():
                self._events.poll(timeout)
            self._standby.maintain(self._read_clock)
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
        except Exception as error:  # no process, memory or descriptor available: retry
            logger.exception("the engine process could not be started")
            return [self._plan_start(f"the engine process could not be started: {error!r}")]
        self._start_at, self._process, self._last_message = None, process, self._read_clock()
        self._watch(process)
        return []

    def _config_of_restart(self) -> EngineConfig:
        """Return the configuration, with a separate recording file for each engine."""
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
                if self._publisher is not None:
                    message.info = msgspec.structs.replace(info, kv_events_ports=self._publisher.tcp_ports)
                self._standby.schedule_start(self._last_message)
            case StartupFailed(error) if self._has_been_ready:
                self._reason = f"the engine could not be built: {error.message}"
            case KVEvents(events) if self._publisher is not None:
                self._publisher.publish(events)
            case StepOutputs(outputs) if any(output.new_token_ids or output.pooled for output in outputs):
                self._history.note_output()

    def _is_internal(self, message: FromEngine) -> bool:
        """Whether a message stays internal: KV events; a replacement that fails to start, a crash."""
        is_crash = isinstance(message, StartupFailed) and self._has_been_ready
        return is_crash or isinstance(message, KVEvents)

    def _hangs_at(self) -> float | None:
        """Return when the engine counts as hung unless something arrives; None: never."""
        limit = self._config.supervision.watchdog_timeout
        if not limit:
            return None
        if not self._is_ready:
            return self._last_message + START_PATIENCE * limit
        user = self._user()
        since = None if user is None else user.waiting_since
        if since is None or self._process is None:
            return None
        return max(since, self._process.acknowledged_at) + limit  # before, it may have waited for us

    def _overdue_at(self) -> float | None:
        """Return `_hangs_at()`, or the extended deadline."""
        due = self._hangs_at()
        if self._extension is not None and self._extension[0] == due:
            return self._extension[1]
        return due

    def _extend_if_late(self, now: float) -> bool:
        """If this process checks so late that it was itself blocked, extend the engine's deadline.

        The engine's messages may have arrived meanwhile, or it may have waited for the front to read them.
        Each deadline is extended once, so that a process that is always late notices a hang, too.
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
        if due is None or now < due or self._extend_if_late(now):
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
            return f"the engine process {process.pid}, still starting, has been silent for {silence:g} s"
        return (
            f"the engine process {process.pid} has requests, but has not finished a step for {limit:g} s "
            "(watchdog_timeout)"
        )


def _close(owner: int, publisher: KVEventPublisher) -> None:
    if os.getpid() == owner:  # a fork has no thread that publishes
        publisher.close()
