"""The client of an engine process: starts it, exchanges messages with it, and ensures that it ends."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.exit_status import describe_end
from quire.engine.messages import (
    STACKS_SIGNAL,
    Acknowledge,
    EngineFailed,
    EngineStart,
    FromEngine,
    Ready,
    Shutdown,
    Starting,
    ToEngine,
    decode_from_engine,
    encode,
    encode_start,
    input_address,
    output_address,
)
from quire.engine.process.output_window import Acknowledgements
from quire.errors import ConfigError, EngineDeadError
from quire.front.interrupt import interruptible
from quire.front.process.launch import end_process, has_ended, is_readable, kill_group, start_process

STARTUP_FAILURE_TIMEOUT = 200
"""Milliseconds to wait for the last messages of an engine process that ended before it was ready."""

MAX_RECEIVED = 64
"""Maximum number of messages decoded at once."""

MAX_RECEIVED_BYTES = 2**18
"""Bytes of messages decoded at once, not counting the last one."""

SHUTDOWN_TIMEOUT = 5.0
"""Seconds before an engine process that was asked to end is killed."""


class EngineProcess:
    """An engine in its own process, which ends when this process ends.

    The engine begins no step while this process is behind: see `OutputWindow`. Not thread-safe.

    Args:
        config: configuration of the engine.
        model_path: directory of the model that `config.model` names.
        num_blocks_before: number of KV blocks of the engine that this one replaces; 0: it replaces none.
        standby: a process that becomes the engine; None: start one.

    Attributes:
        has_more: whether more messages may have arrived than `receive` has returned.
        acknowledged_at: when, on the monotonic clock, messages were acknowledged last.

    Raises:
        ConfigError: no sockets can be made in the directory for temporary files.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        num_blocks_before: int = 0,
        standby: subprocess.Popen[bytes] | None = None,
    ) -> None:
        # Before the process is started: raises if the configuration cannot be sent.
        start = encode_start(
            EngineStart(
                config=config,
                model_path=str(model_path),
                module_path=list(sys.path),
                num_blocks_before=num_blocks_before,
            )
        )
        self.has_more = False
        self.acknowledged_at = -math.inf
        self._acknowledgements = Acknowledgements()
        self._ready = False
        self._failure = ""
        self._is_unreadable = False
        self._process = start_process() if standby is None else standby
        try:
            context = zmq.Context(io_threads=1)
            self._directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        except BaseException:
            end_process(os.getpid(), self._process)
            raise
        self._write(os.fsencode(self._directory) + b"\n")  # the process removes it if this one dies
        sockets: list[zmq.Socket[bytes]] = []
        self._finalizer = weakref.finalize(
            self, _clean_up, os.getpid(), self._process, context, sockets, self._directory
        )
        self._input = context.socket(zmq.PUSH)
        self._output = context.socket(zmq.PULL)
        sockets += (self._input, self._output)
        self._bind()
        self._write(start)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def message_fd(self) -> int:
        """Becomes readable when messages may have arrived; drain them with `receive(0)` each time."""
        return int(self._output.getsockopt(zmq.FD))

    @property
    def death_fd(self) -> int:
        """Becomes readable when the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine; never blocks. If the engine is dead, the message is lost."""
        if self._finalizer.alive:
            with contextlib.suppress(zmq.Again):
                self._input.send(encode(message), zmq.NOBLOCK)

    def receive(self, timeout: float | None) -> list[FromEngine]:
        """Return messages that have arrived, waiting at most `timeout` seconds for the first.

        Messages returned by the call before count as processed. `has_more` is set if `MAX_RECEIVED` or
        `MAX_RECEIVED_BYTES` cut the result short.

        Args:
            timeout: None: wait indefinitely.

        Raises:
            EngineDeadError: the process has ended, and no messages are left, or the next cannot be read.
        """
        if not self._finalizer.alive:
            raise EngineDeadError("the engine has been shut down")
        self._acknowledge()
        messages = self._drain()
        if messages:
            return messages
        if self._is_unreadable:
            raise EngineDeadError(self._failure)
        poller = zmq.Poller()
        poller.register(self._output, zmq.POLLIN)
        poller.register(self.death_fd, zmq.POLLIN)
        with interruptible():
            ready = dict(poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        if self.death_fd in ready and not self._ready:
            self._output.poll(STARTUP_FAILURE_TIMEOUT)
        messages = self._drain()
        if self.death_fd in ready and not messages:
            raise EngineDeadError(self._describe_exit())
        return messages

    def log_stacks(self) -> None:
        """Have the engine write the stacks of its threads to its log."""
        self._process.send_signal(STACKS_SIGNAL)

    def kill(self) -> None:
        """Kill the process; `receive` reports its end."""
        kill_group(self._process)

    def close(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """Tell the engine to end, kill it after `timeout` seconds, and clean up."""
        if self._ready and self._finalizer.alive:
            self.send(Shutdown())
            is_readable(self.death_fd, timeout)
        self._finalizer()

    def _bind(self) -> None:
        for socket in (self._input, self._output):
            socket.set_hwm(0)
            socket.linger = 0
        try:
            self._input.bind(input_address(self._directory))
            self._output.bind(output_address(self._directory))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"no sockets can be made in {self._directory}: {os.strerror(error.errno or 0)}; set TMPDIR "
                "to another directory"
            ) from error

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already; receive() will raise
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _acknowledge(self) -> None:
        """Acknowledge processed messages to the engine, once they add up to enough bytes."""
        if num_bytes := self._acknowledgements.take_processed():
            self.acknowledged_at = time.monotonic()
            self.send(Acknowledge(num_bytes))

    def _drain(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        num_received = num_bytes = 0
        self.has_more = True
        while num_received < MAX_RECEIVED and num_bytes < MAX_RECEIVED_BYTES and not self._is_unreadable:
            try:
                data = self._output.recv(zmq.NOBLOCK)
            except zmq.Again:
                self.has_more = False
                break
            num_received += 1
            num_bytes += len(data)
            self._acknowledgements.note_received(data)
            try:
                message = decode_from_engine(data)
            except msgspec.DecodeError as error:  # later messages would lack its tokens
                self._is_unreadable = True
                self._failure = f"the engine has sent a message that cannot be read: {error}"
                break
            if isinstance(message, Starting):
                shutil.rmtree(self._directory, ignore_errors=True)  # both sockets are connected
            self._ready = self._ready or isinstance(message, Ready)
            if isinstance(message, EngineFailed):
                self._failure = message.reason
            else:
                messages.append(message)
        return messages

    def _describe_exit(self) -> str:
        if self._failure:
            return self._failure
        if not has_ended(self._process, SHUTDOWN_TIMEOUT):
            return f"the engine process {self.pid} has closed its output; its log is on standard error"
        kill_group(self._process)  # also ranks that are stopped
        how = describe_end(self._process.wait())
        return f"the engine process {self.pid} {how}; its log is on standard error"


def _clean_up(
    owner: int,
    process: subprocess.Popen[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    sockets: Sequence[zmq.Socket[bytes]],
    directory: Path,
) -> None:
    """End the process, and remove sockets, pipes and files."""
    if os.getpid() != owner:
        return  # in a fork of the front, which must not end the engine
    end_process(owner, process)
    # The context only has weak references to its sockets. A garbage collection clears these, and a context
    # that does not close its sockets waits for them forever.
    for socket in sockets:
        socket.close(linger=0)
    context.destroy(linger=0)
    shutil.rmtree(directory, ignore_errors=True)
