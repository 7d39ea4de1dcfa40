"""Compiling grammars in threads: equal specifications share one compilation, and each has a time limit."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from quire.errors import InvalidRequestError, QuireError
from quire.grammar.interface import Grammar, GrammarBackend, SlowGrammarError, failure_of
from quire.structured_outputs import StructuredOutputsParams

COMPILE_TIMEOUT = 30.0
"""Seconds that a request waits for its grammar before it ends with an error."""

NUM_COMPILERS = 2  # slow grammars have one of these
COMPILER_STACK_BYTES = 64 * 2**20  # compilers recurse as deep as a grammar's rules nest


@dataclasses.dataclass(slots=True, frozen=True)
class _Waiting:
    """A request whose grammar is being compiled."""

    spec: StructuredOutputsParams
    deadline: float  # seconds


@dataclasses.dataclass(slots=True)
class _Compilation:
    """One specification to be compiled, and the requests that wait for it."""

    request_ids: dict[str, None] = dataclasses.field(default_factory=dict)
    tenants: dict[str, None] = dataclasses.field(default_factory=dict)
    is_slow: bool = False
    future: Future[Grammar] | None = None  # None: its turn has not come


class GrammarCompiler:
    """Compiles the grammars of requests; all methods are called in one thread.

    Tenants take turns, so that one with many grammars delays mostly its own. Those that turn out to be slow
    wait apart and are compiled one at a time, so that no other waits for them. The grammars used last are
    kept, as many as fit.

    Args:
        backend: does the work.
        clock: seconds.
        max_cache_bytes: that the grammars kept may have together.
        executor: runs the compilations; None: `NUM_COMPILERS` threads, started when first needed.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        clock: Callable[[], float],
        max_cache_bytes: int,
        executor: Executor | None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._executor = executor
        self._waiting: dict[str, _Waiting] = {}  # by deadline, since all wait equally long
        self._results: dict[str, Grammar | QuireError] = {}  # grammars or errors, by request
        self._compilations: dict[StructuredOutputsParams, _Compilation] = {}
        self._queue = FairQueue()
        self._slow_queue = FairQueue()
        self._submitted: set[Future[Grammar]] = set()
        self._slow: Future[Grammar] | None = None  # the one of these that is slow
        self._ended: deque[StructuredOutputsParams] = deque()  # filled by the compiling threads
        self._cache = GrammarCache(max_cache_bytes)

    def __len__(self) -> int:
        """Return the number of requests that `take_results` has yet to report."""
        return len(self._waiting) + len(self._results)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or request_id in self._results

    def start(self, request_id: str, spec: StructuredOutputsParams, tenant: str = "") -> None:
        """Let a request's grammar be compiled when its tenant's turn comes; `take_results` reports it."""
        deadline = self._clock() + COMPILE_TIMEOUT
        cached = self._cache.get(spec)
        if cached is not None:
            self._results[request_id] = cached
            return
        compilation = self._compilations.setdefault(spec, _Compilation())
        compilation.request_ids[request_id] = None
        self._waiting[request_id] = _Waiting(spec, deadline)
        compilation.tenants[tenant] = None
        if compilation.future is None:
            self._queue_of(compilation).push(tenant, spec)
            self._submit_next()

    def take_results(self) -> dict[str, Grammar | QuireError]:
        """Return by request id what ended since the last call: a grammar shared by requests, or an error."""
        if not (self._compilations or self._results or self._ended):
            return {}
        while self._ended:
            self._collect(self._ended.popleft())
        self._expire()
        self._submit_next()
        results, self._results = self._results, {}
        return results

    def forget(self, request_id: str) -> None:
        """Stop compiling for a request; unknown ids are ignored."""
        self._results.pop(request_id, None)
        self._stop_waiting(request_id)

    def shutdown(self) -> None:
        """Forget everything; results of running compilations are ignored."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        held = (self._waiting, self._results, self._compilations, self._queue, self._submitted)
        for each in (*held, self._slow_queue, self._ended, self._cache):
            each.clear()

    def _submit_next(self) -> None:
        """Submit compilations as long as a compiler is idle."""
        self._submitted = {future for future in self._submitted if not future.done()}
        if self._slow is not None and self._slow.done():
            self._slow = None
        while len(self._submitted) < NUM_COMPILERS and (spec := self._next()) is not None:
            compilation = self._compilations[spec]
            compilation.future = self._submit(spec, is_slow=compilation.is_slow)
            self._submitted.add(compilation.future)
            if compilation.is_slow:
                self._slow = compilation.future

    def _next(self) -> StructuredOutputsParams | None:
        spec = self._queue.pop()
        return self._slow_queue.pop() if spec is None and self._slow is None else spec

    def _queue_of(self, compilation: _Compilation) -> FairQueue:
        return self._slow_queue if compilation.is_slow else self._queue

    def _submit(self, spec: StructuredOutputsParams, *, is_slow: bool) -> Future[Grammar]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        previous = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            compile_spec = self._backend.compile_slowly if is_slow else self._backend.compile
            future = self._executor.submit(compile_spec, spec)
        except Exception as error:  # no thread can be started, for one
            future = Future()
            future.set_exception(
                QuireError(f"the grammar of structured_outputs cannot be compiled now: {error!r}; try again")
            )
        finally:
            threading.stack_size(previous)
        future.add_done_callback(lambda _: self._ended.append(spec))
        return future

    def _collect(self, spec: StructuredOutputsParams) -> None:
        """Give a compiled grammar, or the error, to the requests that wait for it."""
        compilation = self._compilations.get(spec)
        if compilation is None or compilation.future is None or not compilation.future.done():
            return  # it was cancelled, and perhaps begun again
        error = compilation.future.exception()
        if isinstance(error, SlowGrammarError) and compilation.request_ids:
            self._set_aside(spec, compilation)
            return
        del self._compilations[spec]
        result = self._kept(spec, compilation.future) if error is None else failure_of(error)
        for request_id in compilation.request_ids:
            del self._waiting[request_id]
            self._results[request_id] = result

    def _kept(self, spec: StructuredOutputsParams, future: Future[Grammar]) -> Grammar | QuireError:
        """Return a compiled grammar, which the cache now has, or an error."""
        grammar = future.result()
        try:
            num_bytes = grammar.num_bytes
        except Exception as error:
            return failure_of(error)
        self._cache.put(spec, grammar, num_bytes)
        return grammar

    def _set_aside(self, spec: StructuredOutputsParams, compilation: _Compilation) -> None:
        """Let a grammar that takes long wait with the others that do."""
        compilation.future, compilation.is_slow = None, True
        for tenant in compilation.tenants:
            self._slow_queue.push(tenant, spec)

    def _expire(self) -> None:
        """End the waiting of requests that have timed out."""
        now = self._clock()
        while self._waiting:
            request_id, waiting = next(iter(self._waiting.items()))
            if waiting.deadline > now:
                return
            self._stop_waiting(request_id)
            self._results[request_id] = InvalidRequestError(
                "the grammar of structured_outputs was not compiled within the limit of "
                f"{COMPILE_TIMEOUT:g} s; make it simpler, or try again when fewer are being compiled",
                param="structured_outputs",
            )

    def _stop_waiting(self, request_id: str) -> None:
        """Take a request off its compilation, and cancel that if no other request waits for it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        compilation = self._compilations[waiting.spec]
        del compilation.request_ids[request_id]
        if compilation.request_ids:
            return
        if compilation.future is None:
            self._queue_of(compilation).remove(waiting.spec)
            del self._compilations[waiting.spec]
        elif compilation.future.cancel():
            del self._compilations[waiting.spec]


class GrammarCache:
    """Grammars in their initial state, by specification; the least recently used are removed first.

    Args:
        max_bytes: that all grammars may have together; one that is larger is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[StructuredOutputsParams, tuple[Grammar, int]] = OrderedDict()

    def get(self, spec: StructuredOutputsParams) -> Grammar | None:
        """Return the grammar of a specification, which has now been used; None: it is not here."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        self._entries.move_to_end(spec)
        return entry[0]

    def put(self, spec: StructuredOutputsParams, grammar: Grammar, num_bytes: int) -> None:
        """Keep a grammar of this size, and remove others if there is no room."""
        self._remove(spec)
        if num_bytes > self._max_bytes:
            return
        self._entries[spec] = grammar, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def clear(self) -> None:
        """Remove everything."""
        self._entries.clear()
        self._num_bytes = 0

    def _remove(self, spec: StructuredOutputsParams) -> None:
        _, num_bytes = self._entries.pop(spec, (None, 0))
        self._num_bytes -= num_bytes


class FairQueue:
    """The queue of compilations. A specification may be in the queues of several tenants.

    Of a tenant's own, every other one is the smallest, so that small ones do not wait behind many that are
    large, and the rest are the oldest, so that none waits for ever.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, _TenantQueue] = OrderedDict()

    def push(self, tenant: str, spec: StructuredOutputsParams) -> None:
        """Add a specification to those of its tenant."""
        self._by_tenant.setdefault(tenant, _TenantQueue()).push(spec)

    def pop(self) -> StructuredOutputsParams | None:
        """Take out the next specification of the tenant whose turn it is; None: nothing waits."""
        if not self._by_tenant:
            return None
        tenant, queue = self._by_tenant.popitem(last=False)
        spec = queue.pop()
        self.remove(spec)
        if queue.specs:
            self._by_tenant[tenant] = queue
        return spec

    def remove(self, spec: StructuredOutputsParams) -> None:
        """Remove a specification from all queues."""
        for tenant in [tenant for tenant, queue in self._by_tenant.items() if spec in queue.specs]:
            del self._by_tenant[tenant].specs[spec]
            if not self._by_tenant[tenant].specs:
                del self._by_tenant[tenant]

    def clear(self) -> None:
        """Take everything out."""
        self._by_tenant.clear()


class _TenantQueue:
    """The specifications of one tenant, never empty between calls of `FairQueue`."""

    def __init__(self) -> None:
        self.specs: dict[StructuredOutputsParams, None] = {}  # the oldest first
        self._by_size: list[tuple[int, int, StructuredOutputsParams]] = []  # a heap; some have been removed
        self._counter = itertools.count()
        self._takes_smallest = True

    def push(self, spec: StructuredOutputsParams) -> None:
        self.specs[spec] = None
        heapq.heappush(self._by_size, (_num_characters(spec), next(self._counter), spec))

    def pop(self) -> StructuredOutputsParams:
        while self._by_size[0][2] not in self.specs:
            heapq.heappop(self._by_size)
        spec = self._by_size[0][2] if self._takes_smallest else next(iter(self.specs))
        self._takes_smallest = not self._takes_smallest
        del self.specs[spec]
        return spec


def _num_characters(spec: StructuredOutputsParams) -> int:
    values = (spec.json, spec.regex, spec.choice, spec.grammar)
    return sum(sum(map(len, value)) for value in values if value is not None)
