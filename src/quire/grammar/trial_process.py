"""The process that tries grammars out: `python -m quire.grammar.trial_process`, see `quire.grammar.trials`.

Standard input has a `TrialStart` and then `Trial`s, one JSON document on each line. Standard output has a
`TrialAnswer` to each; to the start when the tokenizer has been read.
Each specification is compiled in a fork of this process, with limits of time and memory.
When standard input closes, the process and its fork end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import msgspec

from quire.grammar.compilation import COMPILER_STACK_BYTES
from quire.grammar.interface import failure_message
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.memory_limit import limit_memory
from quire.structured_outputs import StructuredOutputsParams

MAX_ERROR_CHARACTERS = 1000  # characters
MAX_TRIAL_ANSWER_BYTES = 12 * MAX_ERROR_CHARACTERS  # bytes; fits into a pipe


class TrialStart(msgspec.Struct):
    """A trial process's first message: the model's tokens, and the limits of a grammar."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: list[int]
    wall_seconds: float
    memory_bytes: int
    closes_objects: bool = True


class Trial(msgspec.Struct):
    """A specification, how much computing time it may take, and at which priority (0 to 19, the lowest)."""

    spec: dict[str, str | list[str] | None]
    cpu_seconds: float
    niceness: int


class TrialAnswer(msgspec.Struct):
    """The error of a specification, whether that is only its compile time, and the grammar's size."""

    error: str | None = None
    is_slow: bool = False
    num_bytes: int = 0


def main() -> None:
    """Try out what standard input asks for, until it closes."""
    line = _read_line()
    if not line:
        return  # the engine has died while this process started
    start = msgspec.json.decode(line, type=TrialStart)
    backend = LLGuidanceBackend(
        lambda: start.tokenizer,
        start.vocab_size,
        lambda: start.eos_token_ids,
        closes_objects=start.closes_objects,
    )
    backend.tokens()
    os.write(1, msgspec.json.encode(TrialAnswer()) + b"\n")
    while line := _read_line():
        answer = _tried(backend, msgspec.json.decode(line, type=Trial), start)
        os.write(1, msgspec.json.encode(answer) + b"\n")


def _read_line() -> bytes:
    """Return a line of standard input, empty at its end; nothing is read ahead, so that `select` sees all."""
    parts = []
    while part := os.read(0, 65536):
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""


def _tried(backend: LLGuidanceBackend, trial: Trial, start: TrialStart) -> TrialAnswer:
    """Compile a specification in a fork; return what is wrong with it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _compile_and_exit(backend, trial, start, write_end)
    os.close(write_end)
    readable, _, _ = select.select([read_end, 0], [], [], start.wall_seconds)
    answer = os.read(read_end, MAX_TRIAL_ANSWER_BYTES) if read_end in readable else b""
    os.close(read_end)
    if not answer:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if 0 in readable and not answer:
        sys.exit()  # the answer is no longer awaited
    if answer:
        return msgspec.json.decode(answer, type=TrialAnswer)
    return _limit(os.waitstatus_to_exitcode(status), trial, start)


def _compile_and_exit(backend: LLGuidanceBackend, trial: Trial, start: TrialStart, write_end: int) -> None:
    try:
        os.nice(trial.niceness)
        limit_memory(COMPILER_STACK_BYTES + start.memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, trial.cpu_seconds)  # its signal ends the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when it has no memory
        spec = StructuredOutputsParams(**trial.spec)  # type: ignore[arg-type]
        previous = threading.stack_size(COMPILER_STACK_BYTES)
        thread = threading.Thread(target=_compile, args=(backend, spec, write_end))
        thread.start()
        threading.stack_size(previous)
        thread.join()
    finally:
        os._exit(0)


def _compile(backend: LLGuidanceBackend, spec: StructuredOutputsParams, write_end: int) -> None:
    answer = TrialAnswer()
    try:
        before = _num_bytes_written()
        grammar = backend.compile(spec)
        answer.num_bytes = _num_bytes_written() - before
        del grammar  # it was alive until here
    except BaseException as raised:
        answer.error = failure_message(raised)[:MAX_ERROR_CHARACTERS]
    os.write(write_end, msgspec.json.encode(answer))


def _num_bytes_written() -> int:
    """Return how much memory this fork does not share, having written to it."""
    fields = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").split()
    return int(fields[fields.index("Private_Dirty:") + 1]) << 10


def _limit(exit_code: int, trial: Trial, start: TrialStart) -> TrialAnswer:
    """Return why a fork has ended without an answer."""
    is_slow = exit_code in (-signal.SIGPROF, -signal.SIGKILL)
    if is_slow:
        what = f"took more than {trial.cpu_seconds:g} s of computing time"
    else:
        what = f"took more than {start.memory_bytes >> 20} MiB, or ended the compiler (exit code {exit_code})"
    return TrialAnswer(f"structured_outputs cannot be used: compiling it {what}; make it simpler", is_slow)


if __name__ == "__main__":
    main()
