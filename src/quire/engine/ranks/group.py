"""The processes of ranks 1 and up, which rank 0 starts, watches and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping

from quire.engine.ranks.messages import Channel, RankConnecting, RankReady, RankStart, ToRank
from quire.engine.ranks.watch import Exchanges, RankWatch
from quire.errors import EngineDeadError

CAUSE_WAIT = 2.0
"""Seconds to wait, when ranks lose touch with one another, for the news that one has ended."""


class RankGroup:
    """Ranks 1 to `size - 1`, each in its own process, which ends when this one does.

    After the first failure of a rank nothing can be computed: calls raise `EngineDeadError` with its reason.

    Args:
        size: number of ranks, this one included.
        timeout: seconds after which a rank that does not react has failed.
        shares_kv: whether this process is to reach the KV of all ranks.
        on_gpus: whether each rank is to see one GPU, that of its number among those that this process sees.

    Attributes:
        rendezvous: descriptor, the same number in all processes, of a file in memory through which the ranks
            find each other.
        kv_file: descriptor, the same number in all processes, of a file in memory for the KV of all ranks;
            None: each has its own.
    """

    def __init__(self, size: int, *, timeout: float, shares_kv: bool = False, on_gpus: bool = False) -> None:
        self.size = size
        self.timeout = timeout
        self.kv_file = os.memfd_create("quire-kv") if shares_kv else None
        self.rendezvous = os.memfd_create("quire-rendezvous")
        self._on_gpus = on_gpus
        self._num_ready = 0  # how often all have been ready
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._watch = RankWatch(self._processes, self._channels, timeout)
        self._finalizer = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self._processes,
            self._channels,
            self._watch,
            [file for file in (self.rendezvous, self.kv_file) if file is not None],
        )
        for rank in range(1, size):
            self._start_process(rank)
        self._watch.begin()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [process.pid for process in self._processes]

    @property
    def failure_fd(self) -> int:
        """Becomes readable when a rank has failed."""
        return self._watch.failure_fd

    def start(self, start_of: Callable[[int], RankStart]) -> None:
        """Tell each rank from 1 on what it is, and wait until all of them look for the others.

        Raises:
            EngineDeadError: a rank has failed; so do the methods below.
        """
        for rank, channel in enumerate(self._channels, start=1):
            self._send(channel, start_of(rank))
        self._watch.wait_for_all(RankConnecting)

    def wait_until_ready(self) -> None:
        """Wait until all ranks have loaded their shards, or have allocated what they were told to."""
        self._num_ready += 1
        self._watch.wait_for_all(RankReady, self._num_ready)

    def watch_exchanges(self, exchanges: Exchanges) -> None:
        """Count exchanges on devices that take too long as a failure, and abort them after any."""
        self._watch.watch_exchanges(exchanges)

    def send(self, message: ToRank) -> None:
        """Tell all ranks what to compute."""
        self.raise_failure()
        for channel in self._channels:
            self._send(channel, message)

    def raise_failure(self) -> None:
        """Raise `EngineDeadError` if a rank has failed."""
        if self._watch.failure is not None:
            raise EngineDeadError(self._watch.failure)

    def failure(self, error: Exception) -> EngineDeadError:
        """Return why the ranks cannot continue, after this one has met `error` in what they do together."""
        if isinstance(error, EngineDeadError):
            return error
        self._watch.wait_for_cause(time.monotonic() + CAUSE_WAIT)
        own = (
            f"rank 0 failed, or a rank has not answered within tensor_parallel_timeout, {self.timeout:g} "
            f"seconds: {type(error).__name__}: {error}"
        )
        return EngineDeadError(self._watch.note_failure(own))

    def close(self) -> None:
        """End all processes."""
        self._finalizer()

    def _send(self, channel: Channel, message: ToRank) -> None:
        try:
            channel.send(message)
        except OSError as error:
            raise self.failure(error) from error

    def _start_process(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        channel.set_send_timeout(self.timeout)
        self._channels.append(channel)
        with theirs:
            number = theirs.fileno()
            module = "quire.engine.ranks.process"
            command = [sys.executable, "-P", "-m", module, str(number), str(os.getpid())]
            passed = [number, self.rendezvous]
            if self.kv_file is not None:
                passed.append(self.kv_file)
            environment = with_gpu(rank, os.environ) if self._on_gpus else None
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed, env=environment)
            )


def with_gpu(number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which CUDA shows one GPU of those that it shows in another environment."""
    name = "CUDA_VISIBLE_DEVICES"
    shown = environment.get(name)
    gpu = str(number) if shown is None else shown.split(",")[number].strip()
    return {**environment, name: gpu}


def _end(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    channels: list[Channel],
    watch: RankWatch,
    files: list[int],
) -> None:
    """Kill and reap the processes, and remove what they shared with this one."""
    if os.getpid() != owner:
        return  # in a fork, which must not end the ranks
    watch.expect_end()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for channel in channels:
        channel.end()
    watch.join()
    for channel in channels:
        channel.close()
    for file in files:
        os.close(file)
