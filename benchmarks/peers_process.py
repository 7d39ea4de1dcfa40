"""An engine's worker process: started, given work, and stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import psutil
from peers_engines import EngineKind
from peers_workload import Workload

ANSWER_SECONDS = 1_800  # seconds to wait for a response of a worker
GOODBYE_SECONDS = 30
LOG_TAIL_CHARS = 1_500


class EngineError(Exception):
    """An engine could not be started, ended, or returned a wrong result; the message says why."""


class EngineProcess:
    """One worker. All its processes are in one process group, so that they can be stopped together.

    All methods may raise `EngineError`: the worker has ended, timed out, or returned a wrong result.
    """

    def __init__(self, kind: EngineKind, precision: str, shape: str, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            self._process = self._popen(kind, precision, shape)
        except OSError as error:
            raise EngineError(f"{error}; `make bench-peers` sets up its environment") from None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, args=(self._process.stdout,), daemon=True).start()
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
            self._answer()
        except BaseException:
            self.kill()
            raise
        self.seconds_to_ready = time.perf_counter() - started

    def _popen(self, kind: EngineKind, precision: str, shape: str) -> subprocess.Popen[str]:
        with self._log.open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                kind.command(precision, shape),
                env={**os.environ, **kind.environ()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Return the seconds that a workload took, and each request's output tokens."""
        assert self._process.stdin is not None
        job = {
            "prompts": prompts,
            "output_tokens": workload.output_tokens,
            "shared_tokens": workload.shared_tokens,
        }
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer()
        lengths = [len(output) for output in answer["outputs"]]
        if lengths != [workload.output_tokens] * workload.num_requests:
            raise EngineError(
                f"{workload.name} should give {workload.output_tokens} tokens each, not {lengths}"
            )
        return answer["seconds"], answer["outputs"]

    def pause(self) -> None:
        """Stop all its processes (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume all its processes."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def awake(self) -> Iterator[Self]:
        """Resume its processes within the context, and stop them afterwards."""
        self.resume()
        try:
            yield self
        finally:
            self.pause()

    def peak_memory(self) -> int:
        """Return the sum of the peak resident memory of its processes in bytes.

        Mapped files are included; memory that processes share is counted for each.
        """
        root = psutil.Process(self._process.pid)
        return sum(_peak_resident(process.pid) for process in (root, *root.children(recursive=True)))

    def close(self) -> None:
        """End the worker by closing its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(GOODBYE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read_lines(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise EngineError(f"no answer within {ANSWER_SECONDS} s") from None
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> EngineError:
        status = self._process.wait()
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:].strip()
        return EngineError(f"its process ended with status {status}; {self._log} ends with:\n{tail}")


def _peak_resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:  # it has just ended
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * sum(int(line.split()[1]) for line in lines)
