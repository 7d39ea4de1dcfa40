"""Structured output: grammars compiled off the step loop, and the tokens they allow in each step."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from quire.errors import InvalidRequestError
from quire.request import Request
from quire.step import NO_TOKEN, GrammarOutput, IntArray, SchedulerOutput
from quire.structured_outputs import StructuredOutputsParams

COMPILE_TIMEOUT = 30.0
"""Seconds that a request waits for its grammar before it ends with an error."""

NUM_COMPILERS = 2
COMPILER_STACK_BYTES = 64 * 2**20  # compilers recurse as deep as a grammar's rules nest
MAX_CACHED_GRAMMARS = 64
ANY_TOKEN = -1  # a word of a bitmask that allows all of its tokens


class Grammar(Protocol):
    """Where one request stands in its grammar."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over these tokens; False, and nothing changes, if they are not allowed.

        Raises:
            InvalidRequestError: following the grammar takes more than its limits; it cannot go on.
        """

    def rollback(self, num_tokens: int) -> None:
        """Go back over the last `num_tokens` accepted tokens."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could be accepted, one after the other. Changes nothing.

        Raises:
            InvalidRequestError: as `accept` does.
        """

    def fill_bitmask(self, row: IntArray) -> None:
        """Write which tokens may come next: [ceil(vocabulary / 32)], see `quire.step.GrammarOutput`.

        Raises:
            InvalidRequestError: as `accept` does, or no token may come next.
        """

    def copy(self) -> Grammar:
        """Return another one at the same place, which goes its own way."""


class GrammarBackend(Protocol):
    """Turns a specification into a grammar."""

    vocab_size: int

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """Return the grammar at its start. Slow; may be called from any thread.

        Raises:
            InvalidRequestError: what is wrong with the specification.
        """


@dataclasses.dataclass(slots=True)
class _Live:
    """A request's grammar; with an error it is no longer followed."""

    grammar: Grammar
    error: str | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class _Waiting:
    """A request whose grammar is being compiled."""

    spec: StructuredOutputsParams
    output_token_ids: list[int]  # generated elsewhere: the grammar starts behind them
    deadline: float


@dataclasses.dataclass(slots=True)
class _Compilation:
    """One specification on its way, and the requests that wait for it."""

    future: Future[Grammar]
    request_ids: dict[str, None]


class Grammars:
    """The grammars of all structured requests: compiled in threads, everything else in the caller's thread.

    Requests with equal specifications share one compilation, and so do later ones while it is among the
    last `MAX_CACHED_GRAMMARS` used; each gets a copy that goes its own way.

    Args:
        backend: compiles; None: there is none, and structured requests are refused.
        clock: seconds.
        executor: runs the compilations; None: `NUM_COMPILERS` threads, started when first needed.
    """

    def __init__(
        self,
        backend: GrammarBackend | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._waiting: dict[str, _Waiting] = {}  # by deadline, since all wait equally long
        self._ready: dict[str, str | None] = {}  # to be reported, with the error if there was one
        self._compilations: dict[StructuredOutputsParams, _Compilation] = {}
        self._ended: deque[StructuredOutputsParams] = deque()  # filled by the compiling threads
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._executor = executor

    def __contains__(self, request_id: object) -> bool:
        """Whether a request has a grammar, be it compiled or not yet."""
        return request_id in self._live or request_id in self._waiting or request_id in self._ready

    @property
    def num_live(self) -> int:
        """Requests with a compiled grammar."""
        return len(self._live)

    @property
    def num_compiling(self) -> int:
        """Requests that `take_compiled` has yet to report."""
        return len(self._waiting) + len(self._ready)

    def refuse_without_backend(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that has a grammar if none can be compiled."""
        if self._backend is None and request.sampling_params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs is given, but the engine has no grammar backend; leave it out",
                param="structured_outputs",
            )

    def start(self, request: Request) -> None:
        """Begin to compile the grammar of a request that has one; `take_compiled` reports it.

        Raises:
            InvalidRequestError: there is no grammar backend.
        """
        self.refuse_without_backend(request)
        spec = request.sampling_params.structured_outputs
        assert spec is not None
        assert self._backend is not None
        waiting = _Waiting(spec, request.output_token_ids.copy(), self._clock() + COMPILE_TIMEOUT)
        if spec in self._cache:
            self._cache.move_to_end(spec)
            self._begin(request.request_id, waiting, self._cache[spec])
            return
        if spec not in self._compilations:
            self._compilations[spec] = _Compilation(self._submit(self._backend, spec), {})
        self._compilations[spec].request_ids[request.request_id] = None
        self._waiting[request.request_id] = waiting

    def take_compiled(self) -> list[tuple[str, str | None]]:
        """Return (request id, error if there was one) of the compilations that ended since the last call.

        A request with an error has no grammar any longer.
        """
        if not (self._compilations or self._ready or self._ended):
            return []
        while self._ended:
            self._land(self._ended.popleft())
        self._expire()
        ready, self._ready = self._ready, {}
        return list(ready.items())

    def forget(self, request_id: str) -> None:
        """Let go of a request's grammar, also while it compiles; unknown ids are ignored."""
        self._live.pop(request_id, None)
        self._ready.pop(request_id, None)
        self._stop_waiting(request_id)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Advance a request's grammar over the tokens that it was given; True if it has none.

        False if they are not allowed, or the grammar could not be followed any further; `error` says why.
        The request cannot go on then.
        """
        live = self._live.get(request_id)
        if live is None:
            return True
        if live.error is None:
            try:
                if live.grammar.accept(token_ids):
                    return True
                live.error = f"the tokens {list(token_ids)} do not follow the grammar of structured_outputs"
            except Exception as error:
                live.error = _described(error)
        return False

    def error(self, request_id: str) -> str | None:
        """Return why a request's grammar can no longer be followed; None if it can."""
        live = self._live.get(request_id)
        return None if live is None else live.error

    def valid_drafts(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Return the drafts up to the first that the request's grammar does not allow; all if it has none."""
        live = self._live.get(request_id)
        if live is None:
            return list(token_ids)
        if live.error is not None:
            return []
        try:
            return list(token_ids[: live.grammar.num_valid(token_ids)])
        except Exception as error:
            live.error = _described(error)
            return []

    def bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Return which tokens the requests of a step may sample; None if none of them has a grammar.

        A grammar that can no longer be followed allows every token here; `accept` refuses whatever comes.
        """
        live = self._live
        if not live:
            return None
        samples = plan.samples
        rows = [row for row, id_ in enumerate(plan.request_ids) if id_ in live and samples[row]]
        if not rows or self._backend is None:
            return None
        drafts = [
            [token for token in tokens if token != NO_TOKEN] for tokens in plan.draft_token_ids[rows].tolist()
        ]
        num_rows = np.array([len(tokens) + 1 for tokens in drafts], dtype=np.int32)
        bitmask = np.full(
            (int(num_rows.sum()), -(-self._backend.vocab_size // 32)), ANY_TOKEN, dtype=np.int32
        )
        request_ids = [plan.request_ids[row] for row in rows]
        first = 0
        for request_id, tokens in zip(request_ids, drafts, strict=True):
            _fill(bitmask[first : first + len(tokens) + 1], live[request_id], tokens)
            first += len(tokens) + 1
        return GrammarOutput(request_ids, num_rows, bitmask)

    def shutdown(self) -> None:
        """Let go of everything; what compiles goes on unheeded to its end."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        for held in (self._live, self._waiting, self._ready, self._compilations, self._ended, self._cache):
            held.clear()

    def _submit(self, backend: GrammarBackend, spec: StructuredOutputsParams) -> Future[Grammar]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        previous = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            future = self._executor.submit(backend.compile, spec)
        finally:
            threading.stack_size(previous)
        future.add_done_callback(lambda _: self._ended.append(spec))
        return future

    def _land(self, spec: StructuredOutputsParams) -> None:
        """Give a compiled grammar to the requests that wait for it."""
        compilation = self._compilations.get(spec)
        if compilation is None or not compilation.future.done():
            return  # it was cancelled, and perhaps begun again
        del self._compilations[spec]
        waiting = [(request_id, self._waiting.pop(request_id)) for request_id in compilation.request_ids]
        error = compilation.future.exception()
        if error is not None:
            self._ready.update({request_id: _described(error) for request_id, _ in waiting})
            return
        grammar = compilation.future.result()
        self._cache[spec] = grammar
        if len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        for request_id, entry in waiting:
            self._begin(request_id, entry, grammar)

    def _begin(self, request_id: str, waiting: _Waiting, compiled: Grammar) -> None:
        """Let a request follow its own copy of a grammar."""
        self._live[request_id] = _Live(compiled.copy())
        self._ready[request_id] = None
        if waiting.output_token_ids and not self.accept(request_id, waiting.output_token_ids):
            self._ready[request_id] = self._live.pop(request_id).error

    def _expire(self) -> None:
        """End the waiting of requests whose time is over."""
        now = self._clock()
        while self._waiting:
            request_id, waiting = next(iter(self._waiting.items()))
            if waiting.deadline > now:
                return
            self._stop_waiting(request_id)
            self._ready[request_id] = (
                "the grammar of structured_outputs was not compiled within the limit of "
                f"{COMPILE_TIMEOUT:g} s; make it simpler, or try again when fewer are being compiled"
            )

    def _stop_waiting(self, request_id: str) -> None:
        """Take a request off its compilation, and that off the queue if nobody else wants it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        compilation = self._compilations[waiting.spec]
        del compilation.request_ids[request_id]
        if not compilation.request_ids and compilation.future.cancel():
            del self._compilations[waiting.spec]


def _fill(rows: IntArray, live: _Live, drafts: list[int]) -> None:
    """Write the masks of a request's places, [drafts + 1, words]; behind a wrong draft all is allowed."""
    num_accepted = 0
    try:
        if live.error is None:
            live.grammar.fill_bitmask(rows[0])
            for draft in drafts:
                if not live.grammar.accept([draft]):
                    break
                num_accepted += 1
                live.grammar.fill_bitmask(rows[num_accepted])
            live.grammar.rollback(num_accepted)
    except Exception as error:
        live.error = _described(error)
        rows[:] = ANY_TOKEN


def _described(error: BaseException) -> str:
    """Return what ends a request; a backend's own failure, too, belongs to the one whose grammar it is."""
    if isinstance(error, InvalidRequestError):
        return str(error)
    return f"the grammar of structured_outputs failed: {type(error).__name__}: {error}"
