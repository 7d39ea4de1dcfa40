"""The engine process: `python -m quire.engine.process.main [--spare]`; `quire.front` starts it.

Standard input carries two lines, the private directory of the sockets and the start message, and then stays
open as the *lifeline*: when it closes, the front has ended, and this process exits immediately, even within a
step. With `--spare`, the lines come when an engine is needed, if ever, and this process imports torch before.
Standard output is kept open so that the front notices when this process ends, and says when a spare has
imported everything; anything printed goes to standard error. SIGINT and SIGTERM are
ignored: the front receives them too, and decides between draining and stopping. `STACKS_SIGNAL`, and every
signal that a fault of the program raises, has the stacks of all threads written to standard error.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from quire.engine.messages import (
    STACKS_SIGNAL,
    Acknowledge,
    EngineFailed,
    EngineStart,
    FromEngine,
    LoadProgress,
    Ready,
    Starting,
    StartupFailed,
    ToEngine,
    decode_start,
    decode_to_engine,
    encode,
    input_address,
    output_address,
    refusal_of,
)
from quire.engine.process.failure_log import log_failed_start
from quire.engine.process.output_window import OutputWindow
from quire.engine.process.standby import wait_as_spare
from quire.engine.process.standby_signs import SPARE_OPTION
from quire.errors import EngineDeadError

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL = 0.05
"""Seconds between progress messages while weights load."""

FRONT_CHECK_INTERVAL = 1.0
"""Seconds between checks that the front is still this process's parent."""

DELIVERY_TIME = 0.01
"""Seconds of handling messages after which the others wait for the next step to be computed."""


class Connection:
    """The two sockets to the front, for incoming and outgoing messages."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            socket.set_hwm(0)
        self._input.connect(input_address(directory))
        self._output.connect(output_address(directory))
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._window = OutputWindow()

    @property
    def has_room(self) -> bool:
        """Whether the front keeps up with what is sent."""
        return self._window.has_room

    def wake_on(self, descriptor: int) -> None:
        """Let `deliver` end its wait, too, when `descriptor` becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, message: FromEngine) -> None:
        """Queue `message` for the front; never blocks."""
        data = encode(message)
        self._window.note_sent(data)
        self._output.send(data)

    def deliver(self, handle: Callable[[ToEngine], None], *, wait: int | None) -> None:
        """Handle what has arrived, or a turn's worth of it, waiting at most `wait` milliseconds for it."""
        self._poller.poll(wait)
        end = time.monotonic() + DELIVERY_TIME
        while True:
            try:
                data = self._input.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver_one(data, handle)
            if time.monotonic() >= end:
                return

    def _deliver_one(self, data: bytes, handle: Callable[[ToEngine], None]) -> None:
        try:
            message = decode_to_engine(data)
        except msgspec.DecodeError as error:
            logger.error("a message from the front cannot be read, and is refused: %s", error)
            self.send(refusal_of(data, error))
            return
        if isinstance(message, Acknowledge):
            self._window.note_processed(message.num_bytes)
        else:
            handle(message)

    def close(self) -> None:
        """Send all queued messages and close the sockets."""
        self._context.destroy(linger=1000)


def main() -> None:
    """Run an engine until the front shuts it down or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = _redirect_standard_output()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    logging.basicConfig(format="%(asctime)s engine[%(process)d] %(levelname)s %(message)s")
    logging.getLogger("quire.engine").setLevel(logging.INFO)
    front = os.getppid()
    has_front = not _has_ended(int(sys.argv[1]))  # else the parent is another by now, whose end says nothing
    if has_front and SPARE_OPTION in sys.argv:
        has_front = wait_as_spare(front, output, FRONT_CHECK_INTERVAL)
    path = sys.stdin.buffer.readline() if has_front or _has_input() else b""
    if not path:  # the front has ended in the meantime
        os._exit(0)
    directory = Path(os.fsdecode(path.removesuffix(b"\n")))
    start_line = sys.stdin.buffer.readline() if has_front else b""
    if not start_line:
        _remove_and_exit(directory)
    lifeline = threading.Thread(target=_exit_with_front, args=(directory, front), daemon=True)
    lifeline.start()
    start = decode_start(start_line)
    sys.path.extend(entry for entry in start.module_path if entry not in sys.path)
    connection = Connection(directory)
    connection.send(Starting())
    try:
        exit_code = _serve(start, connection)
    except Exception:
        logger.exception("the engine process failed")
        exit_code = 1
    connection.close()
    sys.stderr.flush()
    os._exit(exit_code)  # skips the teardown of torch, which takes time


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended; False where that cannot be told."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # not every sandbox has it
        return False
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def _has_input() -> bool:
    """Return whether the front has written anything or closed the pipe, which forks of it may keep open."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _redirect_standard_output() -> int:
    """Redirect what is printed to standard error; return a descriptor of the pipe to the front."""
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def _remove_and_exit(directory: Path) -> NoReturn:
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _exit_with_front(directory: Path, front: int) -> None:
    """Exit when the lifeline closes, or when the front has ended but a fork of it keeps the lifeline open."""
    lifeline = sys.stdin.fileno()
    while os.getppid() == front:
        readable, _, _ = select.select([lifeline], [], [], FRONT_CHECK_INTERVAL)
        if readable and not os.read(lifeline, 1):
            break
    _remove_and_exit(directory)


def _serve(start: EngineStart, connection: Connection) -> int:
    try:
        core = _build_core(start, connection)
    except Exception as error:
        connection.send(StartupFailed(log_failed_start(error)))
        return 1
    from quire.engine.loop import EngineLoop

    loop = EngineLoop(core, connection.send)
    gc.freeze()  # objects alive now stay: garbage collections can skip them
    if core.ranks is not None:
        connection.wake_on(core.ranks.failure_fd)
    connection.send(Ready(core.info))
    try:
        loop.run(connection)
    except EngineDeadError as error:
        logger.error("the engine ends: %s", error)
        connection.send(EngineFailed(str(error)))
        if core.ranks is not None:
            core.ranks.close()
        return 1
    return 0


def _build_core(start: EngineStart, connection: Connection) -> EngineCore:
    """Import torch and all that needs it, and build the engine."""
    from quire.engine.core import EngineCore

    next_report = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_report
        now = time.monotonic()
        if now >= next_report or done == total:
            next_report = now + PROGRESS_INTERVAL
            connection.send(LoadProgress(done, total))

    return EngineCore(
        start.config,
        Path(start.model_path),
        on_progress=report,
        num_blocks_before=start.num_blocks_before,
    )


if __name__ == "__main__":
    main()
