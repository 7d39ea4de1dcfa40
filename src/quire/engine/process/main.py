"""The engine process: `python -m quire.engine.process.main [--standby]`; `quire.front` starts it.

Standard input carries two lines, the private directory of the sockets and the start message, and then stays
open as the *lifeline*: when it closes, the front has ended, and this process exits immediately, even within a
step. With `--standby`, the lines come when an engine is needed, if ever; until then it imports torch.
Standard output is kept open so that the front notices when this process ends, and says when a standby has
imported everything; anything printed goes to standard error. SIGINT and SIGTERM are
ignored: the front receives them too, and decides between draining and stopping. `STACKS_SIGNAL`, and every
signal that a fault of the program raises, has the stacks of all threads written to standard error.
"""

from __future__ import annotations

import contextlib
import datetime
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from quire.engine.messages import (
    STACKS_SIGNAL,
    Acknowledge,
    EngineFailed,
    EngineStart,
    ErrorInfo,
    FromEngine,
    KVEvents,
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
from quire.engine.process.output_window import OutputWindow
from quire.engine.process.standby_signs import STANDBY_IMPORTED, STANDBY_OPTION
from quire.errors import EngineDeadError, QuireError
from quire.state_directory import state_directory

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.kv.blocks.events import KVCacheEvent

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL = 0.05
"""Seconds between progress messages while weights load."""

FRONT_CHECK_INTERVAL = 1.0
"""Seconds between checks that the front is still this process's parent."""

MAX_LOG_BYTES = 1 << 20
"""Size from which engine.log, with why engines could not be built, is written from its beginning."""

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
            if (message := self._decode(data)) is not None:
                handle(message)
            if time.monotonic() >= end:
                return

    def _decode(self, data: bytes) -> ToEngine | None:
        """Return a message for the engine; an unreadable one is refused here, an acknowledgement noted."""
        try:
            message = decode_to_engine(data)
        except msgspec.DecodeError as error:
            logger.error("a message from the front cannot be read, and is refused: %s", error)
            self.send(refusal_of(data, error))
            return None
        if isinstance(message, Acknowledge):
            self._window.note_processed(message.num_bytes)
            return None
        return message

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
    if has_front and STANDBY_OPTION in sys.argv:
        has_front = _wait_as_standby(front, output)
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


def _wait_as_standby(front: int, output: int) -> bool:
    """Import what an engine imports, and return when the front has written to standard input, or closed it.

    If something cannot be imported, the process exits.

    Args:
        front: process id of the parent.
        output: descriptor of the original standard output.

    Returns:
        False: the front has ended, while a fork of it keeps the pipe open.
    """
    imported, has_imported = os.pipe()
    # In a thread: who has taken the idle priority may not be allowed to leave it.
    importing = threading.Thread(target=_import_when_idle, args=(has_imported,), daemon=True)
    importing.start()
    awaited = [sys.stdin.fileno(), imported]
    while os.getppid() == front:
        readable, _, _ = select.select(awaited, [], [], FRONT_CHECK_INTERVAL)
        if sys.stdin.fileno() in readable:
            return True
        if not readable:
            continue
        importing.join(FRONT_CHECK_INTERVAL)  # it needs the interpreter's lock, and may wait for a core
        if not importing.is_alive():
            awaited.remove(imported)
            os.close(imported)
            with contextlib.suppress(BrokenPipeError):  # the front has ended
                os.write(output, STANDBY_IMPORTED)
    return False


def _import_when_idle(has_imported: int) -> None:
    """Import on otherwise idle processors, and close a descriptor."""
    with contextlib.suppress(OSError):  # not every sandbox and C library lets threads do that
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        with _without_collections():
            import quire.engine.core
            import quire.engine.loop  # noqa: F401
            from quire.engine.building.assembly import import_ahead

            import_ahead()
    except BaseException:
        logger.exception("a standby engine process cannot import what engines need")
        os._exit(1)
    os.close(has_imported)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import without garbage collections: each would visit all objects so far, which later ones skip."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
    with _without_collections():
        from quire.engine.core import EngineCore

    next_report = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_report
        now = time.monotonic()
        if now >= next_report or done == total:
            next_report = now + PROGRESS_INTERVAL
            connection.send(LoadProgress(done, total))

    def publish(events: Sequence[KVCacheEvent]) -> None:
        connection.send(KVEvents(msgspec.Raw(encode(events))))

    return EngineCore(
        start.config,
        Path(start.model_path),
        on_progress=report,
        num_blocks_before=start.num_blocks_before,
        publish_events=publish if start.config.kv_events.kv_events_endpoint else None,
    )


def log_failed_start(error: Exception) -> ErrorInfo:
    """Append the traceback of an engine that could not be built to engine.log in the state directory.

    Returns:
        What the front is told: the error, with the name of the file if the error alone does not say what to
        do. Without the file, the traceback of such an error is on standard error.
    """
    info = ErrorInfo.of(error)
    explains_itself = isinstance(error, (QuireError, OSError))
    try:
        file = _append("".join(traceback.format_exception(error)))
    except (OSError, RuntimeError):  # no directory that may be written, or no home at all
        if not explains_itself:
            logger.error("the engine could not be built", exc_info=error)
        return info
    if not explains_itself:
        info.message += f" (the traceback is in {file})"
    return info


def _append(text: str) -> Path:
    file = state_directory() / "engine.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    is_full = file.exists() and file.stat().st_size >= MAX_LOG_BYTES
    with file.open("w" if is_full else "a", encoding="utf-8", errors="backslashreplace") as opened:
        opened.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} the engine could not be built\n{text}\n")
    return file


if __name__ == "__main__":
    main()
