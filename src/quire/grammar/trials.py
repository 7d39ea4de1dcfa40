"""Grammars are tried out in another process first, with limits of time and memory, and then compiled here.

What llguidance compiles cannot be sent from one process to another, so a grammar is compiled twice; the
second time it is known to take little. A few kilobytes of JSON schema could take minutes and all memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from quire.errors import InvalidRequestError
from quire.grammar.interface import Grammar
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.grammar.trial_process import TrialStart
from quire.structured_outputs import StructuredOutputsParams

CPU_SECONDS = 0.5  # that compiling one grammar may take
WALL_SECONDS = 20.0  # on a busy machine: trials have the lowest priority
MEMORY_BYTES = 256 * 2**20


class TriedGrammars:
    """A backend that compiles only what a trial process has compiled within the limits.

    Trial processes are started when they are first needed, one for each compilation at a time.

    Args:
        backend: compiles here.
        cpu_seconds: that one grammar may take.
    """

    def __init__(self, backend: LLGuidanceBackend, *, cpu_seconds: float = CPU_SECONDS) -> None:
        self.vocab_size = backend.vocab_size
        self._backend = backend
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Return the grammar in its initial state.

        Raises:
            InvalidRequestError: what is wrong with the specification, or that it exceeds a limit.
        """
        error = self._try(spec)
        if error is not None:
            raise InvalidRequestError(error, param="structured_outputs")
        return self._backend.compile(spec)

    def close(self) -> None:
        """End all trial processes, also while they compile."""
        with self._lock:
            self._is_closed = True
            processes, self._all = self._all, set()
        for process in processes:
            _end(process)

    def _try(self, spec: StructuredOutputsParams) -> str | None:
        """Return what a trial process says is wrong with a specification."""
        process = self._take()
        try:
            answer = _ask(process, msgspec.json.encode(_fields(spec)))
        except OSError as error:
            self._give_up(process)
            return f"structured_outputs cannot be used: {error}"
        with self._lock:
            self._idle.append(process)
        return answer

    def _take(self) -> subprocess.Popen[bytes]:
        """Return a process that nobody else uses."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the engine ends")
            if self._idle:
                return self._idle.pop()
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.grammar.trial_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._all.add(process)
        try:
            _ask(process, msgspec.json.encode(self._start(*self._backend.tokens())))
        except BaseException:
            self._give_up(process)
            raise
        return process

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._all.discard(process)
        _end(process)

    def _start(self, tokenizer: str, eos_token_ids: Sequence[int]) -> TrialStart:
        return TrialStart(
            tokenizer,
            self.vocab_size,
            list(eos_token_ids),
            cpu_seconds=self._cpu_seconds,
            wall_seconds=WALL_SECONDS,
            memory_bytes=MEMORY_BYTES,
        )


def _fields(spec: StructuredOutputsParams) -> dict[str, object]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _ask(process: subprocess.Popen[bytes], line: bytes) -> str | None:
    """Return the answer to a line.

    Raises:
        OSError: the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise ConnectionError("the process that compiles grammars has ended; send the request again")
    return msgspec.json.decode(answer, type=str | None)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
