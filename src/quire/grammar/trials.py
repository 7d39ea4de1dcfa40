"""Tries grammars out in another process, with limits of time and memory, before they are compiled here.

What llguidance compiles cannot be sent from one process to another, so a grammar is compiled twice; the
second time it is known to take little. A few kilobytes of JSON schema could take minutes and all memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from quire.errors import InvalidRequestError
from quire.grammar.interface import Grammar, SlowGrammarError
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.grammar.reasoning import ReasoningEnd, ReasoningGrammar
from quire.grammar.time_limit import TimeLimitedGrammar
from quire.grammar.trial_process import MAX_TRIAL_ANSWER_BYTES, Trial, TrialAnswer, TrialStart
from quire.structured_outputs import ReasoningParams, StructuredOutputsParams

QUICK_CPU_SECONDS = 0.03  # more than most grammars take
CPU_SECONDS = 0.5  # that compiling one grammar may take
QUICK_NICENESS = 5  # does not wait long for the model's threads on a busy machine
NICENESS = 19  # gets what others leave
WALL_SECONDS = 20.0  # on a busy machine: trials have a low priority
ANSWER_SECONDS = 30.0  # after which a trial process hangs itself
MEMORY_BYTES = 256 * 2**20


class TriedGrammars:
    """A backend that compiles only what a trial process has compiled within the limits.

    Trial processes are started when they are first needed, one for each compilation at a time.

    Args:
        backend: compiles here.
        cpu_seconds: that compiling one grammar may take.
        seconds_per_token: seconds per token of computing time that following one may take; 0: no limit.
    """

    def __init__(
        self,
        backend: LLGuidanceBackend,
        *,
        cpu_seconds: float = CPU_SECONDS,
        seconds_per_token: float = 0.0,
    ) -> None:
        self.vocab_size = backend.vocab_size
        self._backend = backend
        self._cpu_seconds = cpu_seconds
        self._seconds_per_token = seconds_per_token
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Return the grammar in its initial state.

        Raises:
            InvalidRequestError: what is wrong with the specification, or that it exceeds a limit.
            SlowGrammarError: it takes longer than most.
        """
        if spec.reasoning is not None:
            return self._after_reasoning(spec.reasoning, spec.structure, self.compile)
        answer = self._try(spec, QUICK_CPU_SECONDS, QUICK_NICENESS)
        if answer.is_slow:
            raise SlowGrammarError
        return self._compiled(spec, answer)

    def compile_slowly(self, spec: StructuredOutputsParams) -> Grammar:
        """Like `compile`, for a specification that may take longer.

        Raises:
            InvalidRequestError: as `compile` does.
        """
        if spec.reasoning is not None:
            return self._after_reasoning(spec.reasoning, spec.structure, self.compile_slowly)
        return self._compiled(spec, self._try(spec, self._cpu_seconds, NICENESS))

    def close(self) -> None:
        """End all trial processes, also while they compile."""
        with self._lock:
            self._is_closed = True
            processes, self._all = self._all, set()
        for process in processes:
            _end(process)

    def _after_reasoning(
        self,
        reasoning: ReasoningParams,
        structure: StructuredOutputsParams | None,
        compile_structure: Callable[[StructuredOutputsParams], Grammar],
    ) -> Grammar:
        grammar = None if structure is None else compile_structure(structure)
        spelling = self._backend.spelling
        return ReasoningGrammar(reasoning, grammar, ReasoningEnd(reasoning, spelling), spelling)

    def _compiled(self, spec: StructuredOutputsParams, answer: TrialAnswer) -> Grammar:
        if answer.error is not None:
            raise InvalidRequestError(answer.error, param="structured_outputs")
        grammar = self._backend.compile(spec, num_bytes=max(answer.num_bytes, 0))
        if not self._seconds_per_token:
            return grammar
        return TimeLimitedGrammar(grammar, self._seconds_per_token)

    def _try(self, spec: StructuredOutputsParams, cpu_seconds: float, niceness: int) -> TrialAnswer:
        """Return a trial process's verdict on a specification."""
        try:
            process = self._take()
        except (OSError, ValueError) as error:
            return TrialAnswer(f"structured_outputs cannot be used: {error}")
        try:
            answer = _ask(process, Trial(_fields(spec), cpu_seconds, niceness))
        except (OSError, ValueError) as error:
            self._give_up(process)
            return TrialAnswer(f"structured_outputs cannot be used: {error}")
        with self._lock:
            self._idle.append(process)
        return answer

    def _take(self) -> subprocess.Popen[bytes]:
        """Return an unused process."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the engine ends")
            if self._idle:
                return self._idle.pop()
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.grammar.trial_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # no Ctrl-C; of a session of its own, its priority would not count
            )
            self._all.add(process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            _ask(process, self._start(*self._backend.tokens()))
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
            wall_seconds=WALL_SECONDS,
            memory_bytes=MEMORY_BYTES,
            closes_objects=self._backend.closes_objects,
        )


def _fields(spec: StructuredOutputsParams) -> dict[str, str | list[str] | None]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _ask(process: subprocess.Popen[bytes], question: TrialStart | Trial) -> TrialAnswer:
    """Return the answer to a question.

    Raises:
        OSError: the process has ended, or does not answer.
        ValueError: its answer is none.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + ANSWER_SECONDS
    unsent = memoryview(msgspec.json.encode(question) + b"\n")
    while unsent:
        _wait(process.stdin, select.POLLOUT, deadline)
        unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
    answer = b""
    while not answer.endswith(b"\n") and len(answer) <= MAX_TRIAL_ANSWER_BYTES:
        _wait(process.stdout, select.POLLIN, deadline)
        piece = os.read(process.stdout.fileno(), MAX_TRIAL_ANSWER_BYTES)
        if not piece:
            raise ConnectionError("the process that compiles grammars has ended; send the request again")
        answer += piece
    return msgspec.json.decode(answer, type=TrialAnswer)


def _wait(pipe: IO[bytes], event: int, deadline: float) -> None:
    poll = select.poll()  # takes descriptors above 1023, unlike select
    poll.register(pipe, event)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError(f"the process that compiles grammars has not answered for {ANSWER_SECONDS:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
