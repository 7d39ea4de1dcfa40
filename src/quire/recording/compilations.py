"""Recorded grammar compilations: threads end at random times, so results are delivered at known points."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import msgspec
from typing_extensions import override

from quire.errors import InvalidRequestError
from quire.grammar.compilation import NUM_COMPILERS
from quire.grammar.interface import SlowGrammarError
from quire.recording.recorded_context import ContextPlayer, replayed_grammar


class Compiled(msgspec.Struct, array_like=True, omit_defaults=True):
    """The outcome of compilation `number`, counted from 0: a grammar, or an error's class and message."""

    number: int
    error_type: str = ""
    error: str = ""


class CompilationRecorder(Executor):
    """Runs compilations in threads of its own; their futures stay pending until `deliver`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        self._under_way: dict[int, tuple[Future[Any], Future[Any]]] = {}  # (in a thread, as handed out)

    @override
    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        running = self._pool.submit(function, *arguments, **options)
        self._under_way[next(self._numbers)] = (running, future)
        return future

    def deliver(self) -> list[Compiled]:
        """Deliver what has been compiled by now, in the order of submission, and return it."""
        delivered = []
        for number, (running, future) in list(self._under_way.items()):
            if future.cancelled():
                running.cancel()
                del self._under_way[number]
            elif running.done():
                del self._under_way[number]
                error = running.exception()
                if error is None:
                    future.set_result(running.result())
                    delivered.append(Compiled(number))
                else:
                    future.set_exception(error)
                    delivered.append(Compiled(number, type(error).__name__, str(error)))
        return delivered

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class CompilationPlayer(Executor):
    """Compiles nothing: delivers what was recorded.

    Args:
        context_player: answers for the grammars.
    """

    def __init__(self, context_player: ContextPlayer) -> None:
        self._context_player = context_player
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}

    @override
    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """`function` is not called."""
        future: Future[Any] = Future()
        self._futures[next(self._numbers)] = future
        return future

    def deliver(self, compiled: list[Compiled]) -> None:
        """Deliver recorded outcomes; those not requested or no longer needed are skipped."""
        for outcome in compiled:
            future = self._futures.pop(outcome.number, None)
            if future is None or future.cancelled():
                continue
            if outcome.error_type:
                future.set_exception(_error(outcome))
            else:
                future.set_result(replayed_grammar(self._context_player))


def _error(outcome: Compiled) -> Exception:
    """Return an exception of the same name and message."""
    for known in (InvalidRequestError, SlowGrammarError):
        if outcome.error_type == known.__name__:
            return known(outcome.error)
    kind: type[Exception] = type(outcome.error_type, (Exception,), {})
    return kind(outcome.error)
